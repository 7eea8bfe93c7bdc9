"""How many blocks fit: device blocks from the memory budget, host slots from the factor, all of it into the machine.

Pure arithmetic over numbers that the composition root measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.arena import arena_bytes, plan_regions
from kvtier_worker.errors import ConfigError

CPU_CACHE_SHARE = 8
"""On CPU the cache gets one part in this many of what ``--max_memory_utilization`` allows."""

CPU_CACHE_BYTES = 4 << 30
"""And no more than this, all ranks together, unless ``--max_cache_size`` says so."""

MIN_BLOCKS = 2
"""Padding and one to use."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What a rank found after its weights were loaded.

    Attributes:
        total: bytes of the memory that holds the device cache.
        used: of those, in use already (weights included).
        host_available: bytes of ordinary memory that can still be had, for all ranks together.
        device_is_host: the device cache is ordinary memory too.
    """

    total: int
    used: int
    host_available: int
    device_is_host: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks and slots of one rank, padding included; 0 slots = no host tier."""

    num_device_blocks: int
    num_host_slots: int


def block_bytes(layout: DomainLayout) -> int:
    """Bytes of one device block, all types of a domain."""
    return sum(objects.payload_bytes for objects in layout.objects.values())


def plan_device_blocks(settings: WorkerSettings, layout: DomainLayout, budget: MemoryBudget) -> int:
    """Device blocks of this rank. All ranks take the least of theirs.

    Raises:
        ConfigError: not even one usable block.
    """
    nbytes = settings.max_cache_size or _derived_cache_bytes(settings, budget)
    blocks = nbytes // block_bytes(layout)
    if blocks >= MIN_BLOCKS:
        return blocks
    least = MIN_BLOCKS * block_bytes(layout)
    if settings.max_cache_size:
        fault = f"--max_cache_size={settings.max_cache_size}: two blocks need {least} bytes; set at least that"
    else:
        fault = (
            f"--max_memory_utilization={settings.max_memory_utilization}: {max(nbytes, 0)} bytes are left for the "
            f"cache beside {budget.used} in use of {budget.total}; two blocks need {least}; "
            "raise it, or set --max_cache_size"
        )
    raise ConfigError([fault])


def plan_sizes(settings: WorkerSettings, layout: DomainLayout, num_blocks: int, budget: MemoryBudget) -> Sizes:
    """Host slots for ``num_blocks`` device blocks, and whether everything fits the machine.

    Raises:
        ConfigError: arena and caches of all ranks need more memory than there is.
    """
    factor = settings.host_blocks_factor
    slots = int(factor * num_blocks) if factor > 1 else 0
    arena = arena_bytes(plan_regions([layout], slots)) if slots else 0
    cache = num_blocks * block_bytes(layout) if budget.device_is_host else 0
    needed = (arena + cache) * settings.tp_size
    if needed <= budget.host_available:
        return Sizes(num_blocks, slots)
    faults: list[str] = []
    if cache * settings.tp_size > budget.host_available:
        most = budget.host_available // settings.tp_size
        faults.append(
            f"--max_cache_size: {settings.tp_size} device cache(s) of {cache} bytes do not fit into "
            f"{budget.host_available} available bytes; set at most {most}"
        )
    else:
        room = budget.host_available // settings.tp_size - cache
        ratio = max(room // layout_slot_bytes(layout), 0) / num_blocks
        fix = f"use at most {ratio:.2f}" if ratio > 1 else "lower --max_cache_size"
        faults.append(
            f"--host_blocks_factor={factor}: {settings.tp_size} host arena(s) of {arena} bytes ({slots} slots) and "
            f"what else is needed ({cache * settings.tp_size} bytes) do not fit into {budget.host_available} available "
            f"bytes; {fix}"
        )
    raise ConfigError(faults)


def layout_slot_bytes(layout: DomainLayout) -> int:
    """Bytes of one host slot, all types of a domain."""
    return sum(objects.slot_bytes for objects in layout.objects.values())


def cpu_cache_bytes(settings: WorkerSettings, total: int) -> int:
    """Device caches of all ranks together on a CPU with ``total`` bytes of memory, unless ``--max_cache_size`` says."""
    return min(int(settings.max_memory_utilization * total) // CPU_CACHE_SHARE, CPU_CACHE_BYTES)


def _derived_cache_bytes(settings: WorkerSettings, budget: MemoryBudget) -> int:
    if budget.device_is_host:
        return cpu_cache_bytes(settings, budget.total) // settings.tp_size
    return int(settings.max_memory_utilization * budget.total) - budget.used
