"""Plans folded to completion from random states with random faults, each pass judged by what was promised.

A failure names its seed; ``Life(seed=…).run()`` repeats it exactly.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.operator_scenarios import Life

SEEDS = range(20)


@cache
def lived(seed: int) -> Fold:
    return Life(seed).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_life_ends_complete_and_keeps_its_promises(seed: int) -> None:
    lived(seed)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), faulty=st.booleans())
def test_any_life_ends_complete_and_keeps_its_promises(seed: int, faulty: bool) -> None:
    Life(seed, faulty=faulty).run()


def test_the_lives_reach_what_they_are_meant_to_test() -> None:
    """A simulation in which nothing fails, drains or rolls proves nothing."""
    told: Counter[str] = Counter()
    for seed in SEEDS:
        fold = lived(seed)
        told.update(event.reason for event in fold.world.events)
        told.update(word for line in fold.trace for word in line.split())
    reasons = ("LeaderElected", "LeaderLost", "RolloutStarted", "RolloutHalted", "RolloutCompleted")
    drains = ("DrainStarted", "DrainCompleted", "DrainBlocked", "CapabilityMissing", "CancelDrain")
    actions = ("Apply", "Scale", "Delete", "DeletePod", "LabelPod", "SaveLedger", "died")
    assert {name for name in (*reasons, *drains, *actions) if not told[name]} == set()
