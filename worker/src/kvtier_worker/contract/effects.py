"""Which flags need others to have an effect, so that one that has none is told instead of passed over. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier_worker.contract.flags import flags_of

if TYPE_CHECKING:
    from kvtier_worker.contract.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class Need:
    """What a flag needs: as it stands on a command line, and whether settings have it."""

    text: str
    met: Callable[[WorkerSettings], bool]


_STORE = Need("--enable_kvcache_store=true", lambda settings: settings.enable_kvcache_store)
_RDMA = Need("--store_protocol=rdma", lambda settings: settings.store_protocol == "rdma")
_HOST = Need("--host_blocks_factor above 1", lambda settings: settings.has_host_tier)
_PREFIX_CACHE = Need("--enable_prefix_cache=true", lambda settings: settings.enable_prefix_cache)
_H2D_LIMIT = Need("--enable_control_h2d_block_num=true", lambda settings: settings.enable_control_h2d_block_num)
_CHUNKS = Need("--enable_chunked_prefill=true", lambda settings: settings.enable_chunked_prefill)
_DERIVED_SIZE = Need("--max_cache_size=0", lambda settings: not settings.max_cache_size)
# With the store a factor that makes no host tier is a violation already.
_MORE_THAN_1 = Need("a value above 1", lambda settings: settings.has_host_tier or settings.enable_kvcache_store)

NEEDS: Final[Mapping[str, tuple[Need, ...]]] = {
    "max_memory_utilization": (_DERIVED_SIZE,),
    "xxh3_128bits_seed": (_PREFIX_CACHE,),
    "device_eviction": (_PREFIX_CACHE,),
    "host_eviction": (_HOST,),
    "host_blocks_factor": (_MORE_THAN_1,),
    "prefetch_timeout": (_STORE,),
    "prefetch_batch_size": (_STORE,),
    "layers_wise_copy_batchs": (_HOST,),
    "store_protocol": (_STORE,),
    "store_rdma_devices": (_STORE, _RDMA),
    "store_master_server_address": (_STORE,),
    "store_metadata_server": (_STORE,),
    "store_local_hostname": (_STORE,),
    "store_shm_client": (_STORE,),
    "store_call_timeout": (_STORE,),
    "store_replica_num": (_STORE,),
    "enable_store_integrity": (_STORE,),
    "enable_control_h2d_block_num": (_HOST,),
    "max_h2d_blocks_per_step": (_HOST, _H2D_LIMIT),
    "enable_restore_cost_gate": (_HOST,),
    "enable_cache_salt": (_PREFIX_CACHE,),
    "enable_mix_batch": (_CHUNKS,),
}
"""Flags that do something only if every one of their needs is met. Combinations that are refused stand in `rules`."""

_ON_BY_DEFAULT: Final = frozenset({"enable_mix_batch"})
"""Switches that are missed when their need is not met: without it they are off, whatever they say."""


def warnings(settings: WorkerSettings) -> tuple[str, ...]:
    """What was asked for and has no effect as the other settings stand, in the order of the flags."""
    found = []
    for name, entry in flags_of(type(settings)).items():
        value = getattr(settings, name)
        asked = value if name in _ON_BY_DEFAULT else value != entry.default
        missing = [need.text for need in NEEDS.get(name, ()) if not need.met(settings)]
        if asked and missing:
            found.append(f"--{name}={entry.render(value)} has no effect; it needs {' and '.join(missing)}")
    return tuple(found)
