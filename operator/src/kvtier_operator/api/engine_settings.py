"""Reads `roles[].settings`: flags of `kvtier engine` that no other field decides. Pure; called by `api`.

Names, types, ranges and defaults are those of `contract.WorkerSettings`: a new flag of the engine needs no change here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvtier_worker.contract import Flag, WorkerSettings, flags_of

from kvtier_operator.api.reading import Reader, nearest
from kvtier_operator.api.units import DECIMAL_ADVICE, parse_decimal

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


FREE: Mapping[str, Flag] = {name: flag for name, flag in flags_of(WorkerSettings).items() if name not in OWNED}
"""Flags that a role may set."""


def read_settings(role: Reader, *, ours: bool) -> Mapping[str, Setting]:
    """Settings of one role, by the engine's flag name.

    Args:
        role: reader of the role; gets the violations.
        ours: the engine is kvtier's own; another one with the same flags may know more words for them.
    """
    settings: dict[str, Setting] = {}
    for name, value in role.values("settings").items():
        if name in OWNED:
            role.reject_key("settings", name, f"not set here; use {OWNED[name]}")
        elif name not in FREE:
            role.reject_key("settings", name, nearest(str(name), tuple(FREE)))
        else:
            typed = _typed(value, FREE[name])
            if typed is None or not _allowed(typed, FREE[name], ours=ours):
                role.reject_key("settings", name, f"write {_described(FREE[name])}")
            else:
                settings[name] = typed
    return settings


def _typed(value: object, flag: Flag) -> Setting | None:
    """The value in the type of the flag; None when it has another one."""
    if flag.kind is float:
        return parse_decimal(value)
    if isinstance(value, (bool, int, str)) and type(value) is flag.kind:
        return value
    return None


def _allowed(value: Setting, flag: Flag, *, ours: bool) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return flag.minimum <= value <= flag.maximum
    return not ours or not flag.choices or value in flag.choices


def _described(flag: Flag) -> str:
    if flag.kind is bool:
        return "true or false"
    if flag.kind is str:
        return " or ".join(flag.choices) or "a string, in quotes if it looks like a number"
    kind = "a whole number" if flag.kind is int else DECIMAL_ADVICE.removeprefix("write ")
    return f"{kind}, {flag.range_hint}" if math.isfinite(flag.minimum) and flag.range_hint else kind
