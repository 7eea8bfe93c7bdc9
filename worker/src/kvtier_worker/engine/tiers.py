"""The two pools of an engine: made from its settings, and shown in its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.eviction import make_policy
from kvtier_worker.core.ids import Tier
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.admission import Admission
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.host_tier import HostTier
from kvtier_worker.engine.scheduler import Scheduler


def build_tiers(settings: WorkerSettings, num_device: int, num_host: int) -> TieredBlockManager:
    """Empty pools of so many slots, padding included; without a prefix cache a host tier would never be read."""
    device = BlockPool(Tier.DEVICE, num_device, make_policy(settings.device_eviction, num_device - 1))
    host = None
    if num_host > 1 and settings.enable_prefix_cache:
        host = HostTier(BlockPool(Tier.HOST, num_host, make_policy(settings.host_eviction, num_host - 1)))
    return TieredBlockManager(device, host, settings.block_size, settings.enable_prefix_cache)


def pools(blocks: TieredBlockManager) -> Mapping[Tier, BlockPool]:
    """The pools there are."""
    found = {Tier.DEVICE: blocks.device}
    if blocks.host is not None:
        found[Tier.HOST] = blocks.host.pool
    return found


def gauges(
    blocks: TieredBlockManager, scheduler: Scheduler, admission: Admission, block_bytes: int
) -> Mapping[str, float]:
    """What a scrape shows of the present, under xLLM's names; ``block_bytes`` of all ranks together."""
    device = blocks.device.counts()
    return {
        "num_running_requests": len(scheduler.running),
        "num_waiting_requests": len(scheduler.waiting),
        "num_pending_requests": admission.num_pending,
        "num_free_blocks": device.free,
        "num_used_blocks": device.leased,
        "num_blocks_in_prefix_cache": device.published,
        "total_kv_cache_size_in_kilobytes": device.usable * block_bytes / 1024,
        "kv_cache_utilization_perc": device.leased / device.usable,
    }
