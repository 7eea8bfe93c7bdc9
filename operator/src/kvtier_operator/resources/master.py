"""The Mooncake masters: their flags, each as a process, and how clients find the one that serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_operator.api import Durability, KVCacheCluster
from kvtier_operator.observed import Component
from kvtier_operator.planning.ports import MasterPort, PortBlock
from kvtier_operator.resources.processes import AnyProbe, HttpProbe, Probe, ProcessSpec, Programs, TcpProbe

_ELECTION_S = 8
"""A dead leader's lease lasts 5 s. One that came back at once could win it again, and would have to read the whole log
first, which the standbys know already."""
_SERVES = {"service_ready": True}
"""/health answers 200 before it serves; this in its body is the truth."""


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """How clients find the serving master.

    Attributes:
        url: host:port, or ``etcd://host:port;host:port``.
        cluster_id: under which the masters elect; empty without etcd.
    """

    url: str = ""
    cluster_id: str = ""

    @property
    def env(self) -> Mapping[str, str]:
        """Environment that a client needs to find it: there is no flag for this in any program."""
        return {"MC_STORE_CLUSTER_ID": self.cluster_id} if self.cluster_id else {}


def master_name(index: int) -> str:
    """Name of a master."""
    return f"master-{index}"


def master_address(cluster: KVCacheCluster, host: str, ports: PortBlock, etcd: Sequence[str]) -> MasterAddress:
    """What clients dial.

    Args:
        cluster: whose masters.
        host: of the only master when there is no etcd.
        ports: its block, likewise.
        etcd: host:port of every member; empty = none.
    """
    if etcd:
        return MasterAddress(f"etcd://{';'.join(etcd)}", cluster.effective_cluster_id)
    return MasterAddress(f"{host}:{ports.port(MasterPort.RPC)}")


def master_admin_url(host: str, ports: PortBlock) -> str:
    """Its health, metrics and admin API."""
    return f"http://{host}:{ports.port(MasterPort.ADMIN)}"


def master_flags(
    cluster: KVCacheCluster, *, host: str, ports: PortBlock, etcd: Sequence[str], admin_host: str = ""
) -> tuple[str, ...]:
    """Flags of one master.

    Args:
        cluster: whose master.
        host: address or name at which clients reach it; it publishes this one.
        ports: its block.
        etcd: host:port of every member; empty = one master without election.
        admin_host: address that its admin port listens on; empty = ``host``.
    """
    master = cluster.master
    return (
        f"--rpc_address={host}",
        f"--rpc_port={ports.port(MasterPort.RPC)}",
        f"--metrics_host={admin_host or host}",
        f"--metrics_port={ports.port(MasterPort.ADMIN)}",
        f"--default_kv_lease_ttl={master.lease_ttl_ms}",
        f"--client_ttl={master.client_ttl_ms // 1000}",
        *_election_flags(cluster, etcd),
        "--logtostderr",
    )


def master_process(
    index: int,
    cluster: KVCacheCluster,
    hosts: Sequence[str],
    blocks: Sequence[PortBlock],
    *,
    etcd: Sequence[str],
    programs: Programs,
) -> ProcessSpec:
    """One master.

    Without an etcd it serves as soon as it runs. Of several, one is elected after some seconds: they start together and
    are ready when each runs and one serves.

    Args:
        index: which one.
        cluster: whose master.
        hosts: of all masters.
        blocks: of all masters, too.
        etcd: host:port of every member; empty = no election.
        programs: commands of this machine.
    """
    host, ports = hosts[index], blocks[index]
    admin = master_admin_url(host, ports)
    rpc = ports.port(MasterPort.RPC)
    probes: tuple[Probe, ...] = (HttpProbe(f"{admin}/health", _SERVES), TcpProbe(rpc, host))
    if etcd:
        serving = tuple(
            HttpProbe(f"{master_admin_url(*one)}/health", _SERVES) for one in zip(hosts, blocks, strict=True)
        )
        probes = (HttpProbe(f"{admin}/health"), AnyProbe(serving, "a leader"))
    return ProcessSpec(
        name=master_name(index),
        argv=(*programs.mooncake_master, *master_flags(cluster, host=host, ports=ports, etcd=etcd)),
        env={"GLOG_minloglevel": "1"},
        probes=probes,
        ports={rpc: "RPC", ports.port(MasterPort.ADMIN): "admin and metrics"},
        start_timeout_s=60 if etcd else 30,
        stop_timeout_s=5,
        component=Component.MASTER,
        url=admin,
        batch=Component.MASTER,
        restart_pause_s=_ELECTION_S if etcd and len(hosts) > 1 else 0,
    )


def _election_flags(cluster: KVCacheCluster, etcd: Sequence[str]) -> tuple[str, ...]:
    if not etcd:
        return ()
    durable = cluster.master.durability is Durability.OPLOG
    return (
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        f"--ha_backend_connstring={';'.join(etcd)}",
        f"--cluster_id={cluster.effective_cluster_id}",
        f"--enable_oplog={'true' if durable else 'false'}",
    )
