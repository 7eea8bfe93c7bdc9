"""How many blocks and slots a rank gets, and what it says when they do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.sizing import CPU_CACHE_BYTES, MemoryBudget, block_bytes, plan_device_blocks, plan_sizes
from kvtier_worker.errors import ConfigError
from kvtier_worker.testing.blocks import domain

LAYOUT = domain()
BLOCK = block_bytes(LAYOUT)
GIB = 1 << 30


def cpu(available: int = 64 * GIB, total: int = 64 * GIB) -> MemoryBudget:
    return MemoryBudget(total, GIB, available, device_is_host=True)


def cuda(total: int = 80 * GIB, used: int = 16 * GIB) -> MemoryBudget:
    return MemoryBudget(total, used, 64 * GIB, device_is_host=False)


def test_a_given_cache_size_is_taken_to_the_block() -> None:
    assert plan_device_blocks(WorkerSettings(max_cache_size=10 * BLOCK + 1), LAYOUT, cpu()) == 10


def test_on_cpu_the_cache_gets_an_eighth_of_what_is_allowed() -> None:
    settings = WorkerSettings(max_memory_utilization=0.5)
    assert plan_device_blocks(settings, LAYOUT, cpu(total=16 * GIB)) == GIB // BLOCK


def test_on_cpu_a_derived_cache_has_an_upper_bound_shared_by_the_ranks() -> None:
    settings = WorkerSettings(max_memory_utilization=0.8, tp_size=4)
    assert plan_device_blocks(settings, LAYOUT, cpu(total=1024 * GIB)) == CPU_CACHE_BYTES // 4 // BLOCK


def test_on_cuda_weights_and_cache_share_what_is_allowed() -> None:
    settings = WorkerSettings(max_memory_utilization=0.5)
    assert plan_device_blocks(settings, LAYOUT, cuda()) == 24 * GIB // BLOCK


def test_no_room_for_a_block_names_the_flag_and_the_numbers() -> None:
    with pytest.raises(ConfigError, match=f"--max_cache_size={BLOCK}: two blocks need {2 * BLOCK} bytes"):
        plan_device_blocks(WorkerSettings(max_cache_size=BLOCK), LAYOUT, cpu())
    with pytest.raises(ConfigError, match=r"--max_memory_utilization=0\.1: 0 bytes are left"):
        plan_device_blocks(WorkerSettings(max_memory_utilization=0.1), LAYOUT, cuda())


@pytest.mark.parametrize(("factor", "slots"), [(0.0, 0), (1.0, 0), (1.5, 15), (4.0, 40)])
def test_host_slots_follow_the_factor_above_one(factor: float, slots: int) -> None:
    sizes = plan_sizes(WorkerSettings(host_blocks_factor=factor), LAYOUT, 10, cpu())
    assert (sizes.num_device_blocks, sizes.num_host_slots) == (10, slots)


def test_an_arena_larger_than_memory_is_refused_with_the_factor_that_would_do() -> None:
    settings = WorkerSettings(host_blocks_factor=8.0)
    budget = cpu(available=1000 * BLOCK)
    with pytest.raises(ConfigError) as caught:
        plan_sizes(settings, LAYOUT, 200, budget)
    (violation,) = caught.value.violations
    assert "--host_blocks_factor=8.0" in violation
    factor = float(violation.rpartition("use at most ")[2])
    assert plan_sizes(WorkerSettings(host_blocks_factor=factor), LAYOUT, 200, budget).num_host_slots > 200


def test_a_cache_larger_than_memory_is_refused_by_its_own_flag() -> None:
    with pytest.raises(ConfigError, match="--max_cache_size"):
        plan_sizes(WorkerSettings(), LAYOUT, 2000, cpu(available=1000 * BLOCK))


def test_on_cuda_only_the_arena_counts_against_memory() -> None:
    budget = MemoryBudget(80 * GIB, 0, 100 * BLOCK, device_is_host=False)
    assert plan_sizes(WorkerSettings(), LAYOUT, 10_000, budget).num_device_blocks == 10_000
    with pytest.raises(ConfigError, match="lower --max_cache_size"):
        plan_sizes(WorkerSettings(host_blocks_factor=2.0), LAYOUT, 10_000, budget)


@given(
    blocks=st.integers(2, 500),
    factor=st.floats(0, 8),
    tp_size=st.integers(1, 4),
    available=st.integers(0, 2000 * BLOCK),
)
def test_what_is_accepted_fits(blocks: int, factor: float, tp_size: int, available: int) -> None:
    settings = WorkerSettings(host_blocks_factor=factor, tp_size=tp_size)
    try:
        sizes = plan_sizes(settings, LAYOUT, blocks, cpu(available=available))
    except ConfigError:
        return
    assert (sizes.num_host_slots + sizes.num_device_blocks) * BLOCK * tp_size <= available
