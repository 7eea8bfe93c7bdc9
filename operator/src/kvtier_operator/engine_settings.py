"""Reads `roles[].settings`: flags of `kvtier engine` that no other field decides. Pure; called by `api`.

Names, types and defaults are those of `contract.WorkerSettings`, so that a new flag of the engine needs no change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.reading import Reader, nearest

Setting = str | int | float | bool

OWNED: Mapping[str, str] = {
    "admin_port": "roles[].port (the admin API shares it)",
    "api_key": "the environment variable KVTIER_API_KEY, so that the key stands in no manifest",
    "enable_kvcache_store": "roles[].tiers.store.enabled",
    "host": "nothing: the runtime decides",
    "host_blocks_factor": "roles[].tiers.host.blocksFactor",
    "instance_role": "roles[].type",
    "master_node_addr": "transport.ports.range",
    "max_cache_size": "roles[].tiers.device.size",
    "max_memory_utilization": "roles[].tiers.device.memoryFraction",
    "model": "model.source.uri",
    "model_id": "model.identity.id",
    "port": "roles[].port",
    "prefetch_batch_size": "roles[].tiers.store.prefetch.batch",
    "prefetch_timeout": "roles[].tiers.store.prefetch.timeout",
    "store_local_hostname": "transport.ports.range",
    "store_master_server_address": "nothing: the runtime decides",
    "store_metadata_server": "nothing: the runtime decides",
    "store_protocol": "transport.protocol",
    "store_rdma_devices": "transport.protocol",
    "store_shm_client": "transport.sharedMemory",
    "tp_size": "roles[].parallelism.tensor",
}
"""Flags that other fields decide, and which."""


def read_settings(role: Reader) -> Mapping[str, Setting]:
    """Settings of one role, by the engine's flag name.

    Args:
        role: reader of the role; gets the violations.
    """
    values = role.values("settings")
    section = Reader(values, role.path("settings"), role.violations)
    defaults = {field.name: getattr(WorkerSettings(), field.name) for field in dataclasses.fields(WorkerSettings)}
    free = tuple(name for name in defaults if name not in OWNED)
    settings: dict[str, Setting] = {}
    for name, value in values.items():
        if name in OWNED:
            section.reject(name, f"not set here; use {OWNED[name]}")
        elif name not in free:
            section.reject(name, nearest(str(name), free))
        else:
            typed = _typed(value, defaults[name])
            if typed is None:
                section.reject(name, f"write {_described(defaults[name])}")
            else:
                settings[name] = typed
    return settings


def _typed(value: object, default: Setting) -> Setting | None:
    """The value in the type of the flag's default; None when it has another one."""
    if isinstance(default, bool):
        return value if isinstance(value, bool) else None
    if isinstance(default, int):
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    try:
        return float(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    except ValueError:
        return None


def _described(default: Setting) -> str:
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int):
        return "a whole number"
    if isinstance(default, str):
        return "a string, in quotes if it looks like a number"
    return 'a number in quotes, as in "2.5" (the API has no floats)'
