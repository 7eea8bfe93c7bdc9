"""A storage node as a process: `kvtier store`, or the wheel's `mooncake_client`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_operator.api import StoreKind, StorePool, Transport
from kvtier_operator.planning.ports import PORTS_PER_STORE_CLIENT, PortBlock
from kvtier_operator.resources.processes import LOOPBACK, HttpProbe, Probe, ProcessSpec, Programs, TcpProbe

_LABEL, _HTTP, _SHM, _DATA = range(4)
STORE_PORTS = _DATA + 2 * PORTS_PER_STORE_CLIENT
"""A node that also serves shared memory holds two clients."""

_MOONCAKE_CLIENT_ENV: Mapping[str, str] = {
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


def shm_address(ports: PortBlock) -> str:
    """host:port at which engines on the same machine reach a node that offers shared memory."""
    return f"{LOOPBACK}:{ports.port(_SHM)}"


def data_port_env(data_ports: PortBlock) -> Mapping[str, str]:
    """Environment that keeps the Mooncake clients of a process inside their ports."""
    return {"MC_MIN_RPC_PORT": str(data_ports.start), "MC_MAX_RPC_PORT": str(data_ports.stop - 1)}


def store_process(
    index: int, pool: StorePool, transport: Transport, *, master: str, ports: PortBlock, programs: Programs
) -> ProcessSpec:
    """One node of a pool; ``master`` is the master's host:port."""
    http, shm, data = ports.port(_HTTP), ports.port(_SHM), ports.tail(_DATA)
    common = (
        f"--host={LOOPBACK}:{ports.port(_LABEL)}",
        f"--global_segment_size={pool.segment_bytes}",
        f"--master_server_address={master}",
        f"--http_port={http}",
    )
    env = data_port_env(data)
    probes: tuple[Probe, ...]
    if pool.kind is StoreKind.KVTIER:
        argv = (*programs.kvtier, "store", *common, *((f"--shm_port={shm}",) if transport.shared_memory else ()))
        probes = (HttpProbe(f"http://{LOOPBACK}:{http}/ready"),)
    else:
        argv = (
            *programs.mooncake_client,
            *common,
            f"--port={shm}",
            "--metadata_server=P2PHANDSHAKE",
            f"--protocol={transport.protocol}",
            "--enable_http_server=true",
            "--logtostderr",
        )
        env = {**_MOONCAKE_CLIENT_ENV, **env}
        probes = (HttpProbe(f"http://{LOOPBACK}:{http}/health"), TcpProbe(shm))
    return ProcessSpec(
        name=store_name(pool.name, index),
        argv=argv,
        env=env,
        probes=probes,
        ports={http: "health and metrics", shm: "shared-memory clients"}
        | dict.fromkeys(range(data.start, data.stop), "store data"),
        start_timeout_s=60,
        stop_timeout_s=15,
    )
