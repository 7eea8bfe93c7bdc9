"""An engine: its settings, a `contract.WorkerSettings`, and the process that they run in. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.api import KVCacheCluster, Role
from kvtier_operator.observed import Component
from kvtier_operator.planning.ports import PortBlock, engine_ports
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.resources.master import MasterAddress
from kvtier_operator.resources.processes import LOOPBACK, HttpProbe, ProcessSpec, Programs
from kvtier_operator.resources.store import data_port_env

STOP_MARGIN_S = 15
"""What an engine may take to stop beyond its drain: flush write-backs, close store clients, end its workers."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine runs.

    Attributes:
        model_dir: the model's folder there, or ``package://…``.
        ports: its block.
        api_port: of its HTTP API.
        api_host: address that the API listens on.
        store_host: address or name at which storage nodes reach it; never 0.0.0.0.
    """

    model_dir: str
    ports: PortBlock
    api_port: int
    api_host: str = LOOPBACK
    store_host: str = LOOPBACK


@dataclasses.dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Where an engine finds the store.

    Attributes:
        master: how it finds the master.
        shm_client: host:port of a storage node on the engine's machine, for shared memory; empty = TCP.
    """

    master: MasterAddress
    shm_client: str = ""


def engine_name(role: str, index: int) -> str:
    """Name of an engine."""
    return f"{role}-{index}"


def engine_settings(cluster: KVCacheCluster, role: Role, place: EnginePlace, store: StoreAddresses) -> WorkerSettings:
    """Settings of one engine."""
    tiers, layout = role.tiers, engine_ports(role)
    settings = WorkerSettings(
        model=place.model_dir,
        model_id=effective_model_id(cluster.model),
        host=place.api_host,
        port=place.api_port,
        max_cache_size=tiers.device_bytes,
        max_memory_utilization=tiers.device_memory_fraction,
        host_blocks_factor=tiers.host_blocks_factor,
        tp_size=role.tensor,
        # The workers of an engine are on one machine, whatever others call it.
        master_node_addr=f"{LOOPBACK}:{place.ports.port(layout.rendezvous)}",
    )
    if tiers.store_enabled:
        settings = dataclasses.replace(
            settings,
            enable_kvcache_store=True,
            prefetch_batch_size=tiers.prefetch_batch,
            prefetch_timeout=tiers.prefetch_timeout_ms,
            store_protocol=str(cluster.transport.protocol),
            store_master_server_address=store.master.url,
            store_local_hostname=f"{place.store_host}:{place.ports.port(layout.labels)}",
            store_shm_client=store.shm_client,
        )
    extra: dict[str, Any] = dict(role.settings)  # names and types were checked when the manifest was parsed
    return dataclasses.replace(settings, **extra)


def engine_env(role: Role, ports: PortBlock, master: MasterAddress) -> Mapping[str, str]:
    """Environment of one engine."""
    return {**data_port_env(_data_ports(role, ports)), **master.env} if role.tiers.store_enabled else {}


def engine_process(
    name: str, role: Role, settings: WorkerSettings, *, ports: PortBlock, master: MasterAddress, programs: Programs
) -> ProcessSpec:
    """One engine with its workers."""
    data = _data_ports(role, ports)
    url = f"http://{settings.host}:{settings.port}"
    return ProcessSpec(
        name=name,
        argv=(*programs.kvtier, "engine", *settings.to_argv()),
        env=engine_env(role, ports, master),
        probes=(HttpProbe(f"{url}/ready"),),
        ports={settings.port: "HTTP API", ports.port(engine_ports(role).rendezvous): "rendezvous of the workers"}
        | dict.fromkeys(range(data.start, data.stop), "store data"),
        start_timeout_s=600,
        stop_timeout_s=settings.drain_timeout / 1000 + STOP_MARGIN_S,
        component=Component.ENGINE,
        url=url,
    )


def _data_ports(role: Role, ports: PortBlock) -> PortBlock:
    return ports.tail(engine_ports(role).data)
