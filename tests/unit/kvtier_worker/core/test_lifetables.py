"""Counting how long blocks wait, and what keeping one is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.lifetables import LifeTable, pooled_hazards, worths

HAZARDS = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def table_of(lives: list[tuple[int, bool]], spans: int, times: int = 1000) -> LifeTable:
    """A table that saw ``times`` blocks of each life: (age at its end, whether it was used again)."""
    table = LifeTable(spans)
    for _ in range(len(lives) * times):
        table.enter()
    for age in range(spans):
        for end, reused in lives:
            if end == age:
                for _ in range(times):
                    table.leave(age, reused=reused)
        table.advance()
    return table


def test_hazard_is_the_share_of_those_who_reached_the_age() -> None:
    hazards = table_of([(0, True), (1, True), (2, True), (9, False)], spans=4).hazards([0.0] * 4)
    assert hazards == pytest.approx([1 / 4, 1 / 3, 1 / 2, 0], rel=0.05)


def test_blocks_that_still_wait_count_only_as_long_as_they_waited() -> None:
    """Half of the blocks of age 0 are used again at once; the newcomers, not yet tried, do not dilute that."""
    table = LifeTable(3)
    for _ in range(2000):
        table.enter()
    for _ in range(1000):
        table.leave(0, reused=True)
    table.advance()
    hazards = table.hazards([0.0] * 3)
    assert hazards[0] == pytest.approx(0.5, rel=0.05)
    assert table.reached[1] == pytest.approx(1000)


def test_who_leaves_unused_is_at_risk_no_longer() -> None:
    table = table_of([(0, False), (1, True)], spans=2)
    assert table.hazards([0.0] * 2) == pytest.approx([0, 1], rel=0.05)


def test_blocks_older_than_the_table_are_not_counted() -> None:
    table = LifeTable(2)
    table.enter()
    for _ in range(5):
        table.advance()
    table.leave(5, reused=True)
    assert table.reused == [0, 0]


def test_old_habits_fade() -> None:
    table = table_of([(0, True)], spans=1)
    for _ in range(138):
        table.advance()
    assert table.reused[0] == pytest.approx(500, rel=0.02)


def test_without_observations_the_prior_decides() -> None:
    assert LifeTable(3).hazards([0.1, 0.2, 0.3]) == pytest.approx([0.1, 0.2, 0.3])


def test_ages_that_nobody_reached_are_taken_to_be_like_the_last_known() -> None:
    pooled = pooled_hazards([table_of([(0, True), (5, False)], spans=1), LifeTable(1)])
    assert pooled == pytest.approx([0.5], rel=0.05)
    young = LifeTable(4)
    for _ in range(4000):
        young.enter()
    for _ in range(1000):
        young.leave(0, reused=True)
    assert pooled_hazards([young, LifeTable(4)]) == pytest.approx([0.25] * 4, rel=0.05)


def test_worth_of_constant_hazard_is_the_hazard() -> None:
    assert worths([0.2] * 30) == pytest.approx([0.2] * 30)


def test_a_block_is_worth_more_the_nearer_its_use() -> None:
    """Nothing for three spans, then a certain use: 1/4, 1/3, 1/2, 1 hits per span."""
    assert worths([0, 0, 0, 1, 0]) == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1, 0])


def test_worth_looks_no_further_than_pays() -> None:
    assert worths([0.5, 0.0, 0.0, 0.1])[0] == pytest.approx(0.5)


@given(HAZARDS)
def test_worth_is_the_best_ratio_over_all_horizons(hazards: list[float]) -> None:
    alive, reuse, occupancy = 1.0, [0.0], [0.0]
    for hazard in hazards:
        occupancy.append(occupancy[-1] + max(alive, 1e-9))
        alive *= 1 - hazard
        reuse.append(1 - alive)
    spans = range(len(hazards))
    expected = [
        max((reuse[t] - reuse[a]) / (occupancy[t] - occupancy[a]) for t in range(a + 1, len(hazards) + 1))
        for a in spans
    ]
    assert worths(hazards) == pytest.approx(expected, rel=1e-6, abs=1e-9)
