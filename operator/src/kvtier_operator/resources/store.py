"""A storage node, `kvtier store` or the wheel's `mooncake_client`: its flags, and as a process. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_worker.contract import HostPort

from kvtier_operator.api import StoreKind, StorePool, Transport
from kvtier_operator.observed import Component
from kvtier_operator.planning.ports import PortBlock, StorePort
from kvtier_operator.resources.master import MasterAddress
from kvtier_operator.resources.processes import HttpProbe, Probe, ProcessSpec, Programs, TcpProbe

MOONCAKE_CLIENT_ENV: Mapping[str, str] = {
    "GLOG_minloglevel": "1",
    "MC_FORCE_TCP": "1",
    # A frozen peer otherwise hangs a call for 30 s.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_RPC_TIMEOUT_MS": "3000",
}
"""What our own programs set for themselves."""


def store_name(pool: str, index: int) -> str:
    """Name of a storage node."""
    return f"store-{pool}-{index}"


def shm_address(host: str, ports: PortBlock) -> str:
    """host:port at which engines on the same machine reach a node that offers shared memory."""
    return f"{host}:{ports.port(StorePort.SHM)}"


def data_port_env(data_ports: PortBlock) -> Mapping[str, str]:
    """Environment that keeps the Mooncake clients of a process inside their ports."""
    return {"MC_MIN_RPC_PORT": str(data_ports.start), "MC_MAX_RPC_PORT": str(data_ports.stop - 1)}


def store_flags(
    pool: StorePool,
    transport: Transport,
    *,
    host: str,
    ports: PortBlock,
    master: MasterAddress,
    http: HostPort | None = None,
) -> tuple[str, ...]:
    """Flags of one node, of the program that its pool names.

    Args:
        pool: of the node.
        transport: of the cluster.
        host: address or name that engines reach; never 0.0.0.0.
        ports: its block.
        master: how it finds the master.
        http: where health and metrics listen; None = on ``host``, at the block's own port. `mooncake_client` chooses
            the address itself.
    """
    common = (
        f"--host={host}:{ports.port(StorePort.LABEL)}",
        f"--global_segment_size={pool.segment_bytes}",
        f"--master_server_address={master.url}",
        f"--http_port={http.port if http else ports.port(StorePort.HTTP)}",
    )
    shm = ports.port(StorePort.SHM)
    if pool.kind is StoreKind.KVTIER:
        listen = (f"--http_host={http.host}",) if http else ()
        return (*common, *listen, *((f"--shm_port={shm}",) if transport.shared_memory else ()))
    return (
        *common,
        f"--port={shm}",
        "--metadata_server=P2PHANDSHAKE",
        f"--protocol={transport.protocol}",
        "--enable_http_server=true",
        "--logtostderr",
    )


def store_env(pool: StorePool, ports: PortBlock, master: MasterAddress) -> Mapping[str, str]:
    """Environment of one node."""
    own = {} if pool.kind is StoreKind.KVTIER else MOONCAKE_CLIENT_ENV
    return {**own, **data_port_env(ports.tail(StorePort.DATA)), **master.env}


def store_process(
    name: str,
    pool: StorePool,
    transport: Transport,
    *,
    host: str,
    ports: PortBlock,
    master: MasterAddress,
    programs: Programs,
) -> ProcessSpec:
    """One node of a pool."""
    http, shm, data = ports.port(StorePort.HTTP), ports.port(StorePort.SHM), ports.tail(StorePort.DATA)
    program = (*programs.kvtier, "store") if pool.kind is StoreKind.KVTIER else programs.mooncake_client
    url = f"http://{host}:{http}"
    probes: tuple[Probe, ...] = (HttpProbe(f"{url}/ready"),)
    if pool.kind is StoreKind.MOONCAKE_CLIENT:
        probes = (HttpProbe(f"{url}/health"), TcpProbe(shm, host))
    return ProcessSpec(
        name=name,
        argv=(*program, *store_flags(pool, transport, host=host, ports=ports, master=master)),
        env=store_env(pool, ports, master),
        probes=probes,
        ports={http: "health and metrics", shm: "shared-memory clients"}
        | dict.fromkeys(range(data.start, data.stop), "store data"),
        start_timeout_s=60,
        stop_timeout_s=15,
        component=Component.STORE,
        url=url,
        batch=Component.STORE,
    )
