"""Members of a managed etcd: their flags, and each as a process. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_operator.observed import Component
from kvtier_operator.planning.ports import EtcdPort, PortBlock
from kvtier_operator.resources.processes import HttpProbe, ProcessSpec, Programs

QUOTA_BYTES = 8 << 30
"""The masters' log grows with every put and is never trimmed; etcd's default of 2 GiB is soon full."""


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """One member.

    Attributes:
        name: unique among them.
        host: address or name at which masters, clients and the other members reach it.
        client_port, peer_port: for these two kinds of callers.
    """

    name: str
    host: str
    client_port: int
    peer_port: int

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """Where the other members find it."""
        return f"http://{self.host}:{self.peer_port}"


def etcd_name(index: int) -> str:
    """Name of a member."""
    return f"etcd-{index}"


def etcd_member(index: int, host: str, ports: PortBlock) -> EtcdMember:
    """A member on its block."""
    return EtcdMember(etcd_name(index), host, ports.port(EtcdPort.CLIENT), ports.port(EtcdPort.PEER))


def etcd_flags(
    member: EtcdMember,
    members: Sequence[EtcdMember],
    *,
    data_dir: str,
    token: str,
    listen_host: str = "",
    quota_bytes: int = QUOTA_BYTES,
) -> tuple[str, ...]:
    """Flags of one member.

    Args:
        member: whose flags.
        members: all of them, this one too.
        data_dir: its folder.
        token: tells clusters apart that could reach each other by mistake.
        listen_host: an address, never a name; empty = the member's host, which must be an address then.
        quota_bytes: size of its database at which it takes no more writes; less than its volume.
    """
    listen = listen_host or member.host
    return (
        f"--name={member.name}",
        f"--data-dir={data_dir}",
        f"--listen-client-urls=http://{listen}:{member.client_port}",
        f"--advertise-client-urls=http://{member.endpoint}",
        f"--listen-peer-urls=http://{listen}:{member.peer_port}",
        f"--initial-advertise-peer-urls={member.peer_url}",
        f"--initial-cluster={','.join(f'{one.name}={one.peer_url}' for one in members)}",
        f"--initial-cluster-token={token}",
        "--initial-cluster-state=new",
        # Every batch of the masters' log overwrites one key: its old versions are of no use to anybody.
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=10m",
        f"--quota-backend-bytes={quota_bytes}",
    )


def etcd_process(
    member: EtcdMember, members: Sequence[EtcdMember], *, data_dir: str, token: str, programs: Programs
) -> ProcessSpec:
    """One member. It is healthy as soon as a majority runs, so all of them start together."""
    url = f"http://{member.endpoint}"
    return ProcessSpec(
        name=member.name,
        argv=(*programs.etcd, *etcd_flags(member, members, data_dir=data_dir, token=token)),
        env={},
        probes=(HttpProbe(f"{url}/health"),),
        ports={member.client_port: "clients", member.peer_port: "peers"},
        start_timeout_s=30,
        stop_timeout_s=10,
        component=Component.ETCD,
        url=url,
        batch=Component.ETCD,
        data_dir=data_dir,
    )
