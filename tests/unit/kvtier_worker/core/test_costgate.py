"""Restore, compute or both: the decision and the rates behind it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.costgate import CostModel, RateEstimate, choose_restore

BLOCK = 128
RATES = st.floats(1.0, 1e9)


def costs(restore: float, prefill: float, *, latency_s: float = 0.0, num_layers: int = 30) -> CostModel:
    """Rates in bytes and tokens a second."""
    return CostModel(RateEstimate().observe(restore, 1), RateEstimate().observe(prefill, 1), latency_s, num_layers)


def choose(num_blocks: int, bytes_per_block: int, model: CostModel, *, tail_tokens: int = 1) -> int:
    return choose_restore(
        num_blocks, bytes_per_block=bytes_per_block, block_size=BLOCK, tail_tokens=tail_tokens, costs=model
    )


def seconds(restored: int, num_blocks: int, bytes_per_block: int, model: CostModel, tail_tokens: int) -> float:
    """The documented formula, written down a second time."""
    compute = ((num_blocks - restored) * BLOCK + tail_tokens) / model.prefill.per_second
    if restored == 0:
        return compute
    copy = model.latency_s + restored * bytes_per_block / model.restore.per_second
    return max(copy, compute) + min(copy, compute) / model.num_layers


def test_a_fast_link_restores_everything() -> None:
    # 8 GB/s at 45 KiB a token delivers 173,000 tokens/s; the model makes 700.
    assert choose(23, 5_898_240, costs(8e9, 700)) == 23


def test_a_slow_link_computes_everything() -> None:
    # 1 MB/s at 45 KiB a token delivers 22 tokens/s; the model makes 100,000.
    assert choose(23, 5_898_240, costs(1e6, 1e5, num_layers=2)) == 0


def test_a_link_as_fast_as_the_model_shares_the_work() -> None:
    # Both make 1,000 tokens/s: half is restored while the other half is computed.
    assert choose(10, BLOCK * 1000, costs(1e6, 1e3)) == 5


def test_a_latency_that_outweighs_the_saving_is_not_paid() -> None:
    assert choose(1, 1000, costs(1e9, 1e3, latency_s=0.0)) == 1
    assert choose(1, 1000, costs(1e9, 1e3, latency_s=10.0)) == 0


@pytest.mark.parametrize(
    "model",
    [
        CostModel(),
        CostModel(restore=RateEstimate().observe(1, 1)),
        CostModel(prefill=RateEstimate().observe(1e9, 1)),
    ],
    ids=["nothing", "only restore", "only prefill"],
)
def test_everything_is_restored_while_a_rate_is_unknown(model: CostModel) -> None:
    assert choose(7, 1 << 30, model) == 7


def test_nothing_to_restore_is_nothing() -> None:
    assert choose(0, 1000, costs(1, 1)) == 0


@given(
    num_blocks=st.integers(1, 40),
    bytes_per_block=st.integers(1, 10**8),
    model=st.builds(costs, RATES, RATES, latency_s=st.floats(0, 1), num_layers=st.integers(1, 64)),
    tail_tokens=st.integers(1, 4096),
)
def test_no_other_number_of_blocks_is_faster(
    num_blocks: int, bytes_per_block: int, model: CostModel, tail_tokens: int
) -> None:
    chosen = choose(num_blocks, bytes_per_block, model, tail_tokens=tail_tokens)
    assert 0 <= chosen <= num_blocks
    times = [seconds(k, num_blocks, bytes_per_block, model, tail_tokens) for k in range(num_blocks + 1)]
    assert times[chosen] <= min(times) * (1 + 1e-9)


def test_a_long_sample_weighs_more_than_a_short_one() -> None:
    rate = RateEstimate().observe(1000, 10).observe(1, 0.0001)
    assert rate.per_second == pytest.approx(901 / 9.0001)


def test_an_estimate_follows_a_change() -> None:
    rate = RateEstimate(keep=0.5).observe(100, 1)
    for _ in range(20):
        rate = rate.observe(10, 1)
    assert rate.per_second == pytest.approx(10, rel=1e-3)


def test_empty_samples_say_nothing() -> None:
    assert not RateEstimate().observe(0, 1).observe(5, 0).known
    with pytest.raises(ValueError, match="without a sample"):
        _ = RateEstimate().per_second
