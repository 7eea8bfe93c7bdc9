"""The real engine over fake workers: random schedules in virtual time, every invariant after every turn.

A failure names its scenario; ``Scenario(seed=…, …).run()`` repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_worker.core.ids import Tier
from kvtier_worker.engine.frontend import FinishReason
from kvtier_worker.testing.scenarios import Scenario
from kvtier_worker.testing.simulation import Simulation

SEEDS = range(7)


def _value(simulation: Simulation, name: str, labels: Mapping[str, str] | None = None) -> float:
    return simulation.engine.metrics.registry.get_sample_value(name, dict(labels or {})) or 0.0


def _assert_tokens_are_conserved(simulation: Simulation) -> None:
    cached = sum(_value(simulation, "prompt_tokens_cached_total", {"tier": tier}) for tier in Tier)
    computed = _value(simulation, "prompt_tokens_computed_total")
    assert _value(simulation, "prompt_tokens_total") == computed + cached


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_equal_the_oracle_and_no_slot_is_lost(seed: int, num_ranks: int) -> None:
    simulation = Scenario(seed, num_ranks).run()
    _assert_tokens_are_conserved(simulation)
    assert not [name for name, client in simulation.clients.items() if client.reason is FinishReason.ERROR]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_store_copies_and_steps_change_no_token(seed: int, num_ranks: int) -> None:
    simulation = Scenario(1000 + seed, num_ranks, faulty=True).run()
    _assert_tokens_are_conserved(simulation)


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), num_ranks=st.sampled_from([1, 2, 3]), faulty=st.booleans())
def test_any_schedule_keeps_the_invariants(seed: int, num_ranks: int, faulty: bool) -> None:
    _assert_tokens_are_conserved(Scenario(seed, num_ranks, faulty=faulty).run())


def test_the_schedules_reach_what_they_are_meant_to_test() -> None:
    """A simulation in which nothing is preempted, shared, restored or fetched proves nothing."""
    totals: dict[str, float] = {}
    for seed in range(6):
        simulation = Scenario(2000 + seed, 1 + seed % 2, faulty=seed >= 3).run()
        totals["preempted"] = totals.get("preempted", 0) + _value(simulation, "num_preempted_requests_total")
        totals["failed"] = totals.get("failed", 0) + _value(simulation, "engine_failed_steps_total")
        for tier in Tier:
            name = {"tier": tier}
            totals[tier] = totals.get(tier, 0) + _value(simulation, "prompt_tokens_cached_total", name)
            totals[f"evicted {tier}"] = totals.get(f"evicted {tier}", 0) + _value(
                simulation, "cache_tier_evictions_total", name
            )
        for outcome in ("hit", "partial", "miss"):
            totals[outcome] = totals.get(outcome, 0) + _value(
                simulation, "cache_prefetch_requests_total", {"outcome": outcome}
            )
    never = {"evicted store"}
    assert not [name for name, count in totals.items() if not count and name not in never], totals
