"""An engine as a process: its command is `contract.WorkerSettings`, rendered. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.api import KVCacheCluster, Role
from kvtier_operator.planning.ports import PORTS_PER_STORE_CLIENT, PortBlock
from kvtier_operator.resources.processes import LOOPBACK, HttpProbe, ProcessSpec, Programs
from kvtier_operator.resources.store import data_port_env

STOP_MARGIN_S = 15
"""What an engine may take to stop beyond its drain: flush write-backs, close store clients, end its workers."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Where an engine finds the store.

    Attributes:
        master: host:port.
        shm_client: host:port of a storage node on the engine's machine, for shared memory; empty = TCP.
    """

    master: str
    shm_client: str


def engine_ports(role: Role) -> int:
    """Ports of one engine of the role, its HTTP API apart."""
    return 1 + role.tensor + PORTS_PER_STORE_CLIENT * role.tensor


def engine_name(role: str, index: int) -> str:
    """Name of an engine."""
    return f"{role}-{index}"


def engine_settings(
    cluster: KVCacheCluster, role: Role, index: int, *, model_dir: str, ports: PortBlock, store: StoreAddresses
) -> WorkerSettings:
    """Settings of one engine; ``model_dir`` is the model's folder on the engine's machine."""
    tiers = role.tiers
    settings = WorkerSettings(
        model=model_dir,
        model_id=cluster.model.id,
        host=LOOPBACK,
        port=role.port + index,
        max_cache_size=tiers.device_bytes,
        max_memory_utilization=tiers.device_memory_fraction,
        host_blocks_factor=tiers.host_blocks_factor,
        tp_size=role.tensor,
        master_node_addr=f"{LOOPBACK}:{ports.port(0)}",
    )
    if tiers.store_enabled:
        settings = dataclasses.replace(
            settings,
            enable_kvcache_store=True,
            prefetch_batch_size=tiers.prefetch_batch,
            prefetch_timeout=tiers.prefetch_timeout_ms,
            store_protocol=str(cluster.transport.protocol),
            store_master_server_address=store.master,
            store_local_hostname=f"{LOOPBACK}:{ports.port(1)}",
            store_shm_client=store.shm_client,
        )
    extra: dict[str, Any] = dict(role.settings)  # names and types were checked when the manifest was parsed
    return dataclasses.replace(settings, **extra)


def engine_process(
    role: Role, index: int, settings: WorkerSettings, ports: PortBlock, programs: Programs
) -> ProcessSpec:
    """One engine with its workers."""
    data = ports.tail(1 + role.tensor)
    return ProcessSpec(
        name=engine_name(role.name, index),
        argv=(*programs.kvtier, "engine", *settings.to_argv()),
        env=data_port_env(data) if settings.enable_kvcache_store else {},
        probes=(HttpProbe(f"http://{settings.host}:{settings.port}/ready"),),
        ports={settings.port: "HTTP API", ports.port(0): "rendezvous of the workers"}
        | dict.fromkeys(range(data.start, data.stop), "store data"),
        start_timeout_s=600,
        stop_timeout_s=settings.drain_timeout / 1000 + STOP_MARGIN_S,
    )
