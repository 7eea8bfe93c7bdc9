"""Unit tests of when a cluster is looked at again without news."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.controller.pace import LONGEST_AGAIN_S, LONGEST_WAIT_S, RESYNC_S, Pace


def make_pace() -> Pace[str]:
    return Pace(Random(1))


def acts(pace: Pace[str], asked_s: float = 0.0) -> float:
    return pace.next_s("a", acted=True, news=False, asked_s=asked_s)


def waits(pace: Pace[str], asked_s: float, *, news: bool = False) -> float:
    return pace.next_s("a", acted=False, news=news, asked_s=asked_s)


def test_what_rests_is_looked_at_every_five_minutes_and_not_all_at_once() -> None:
    pace = make_pace()
    found = {waits(pace, 0.0) for _ in range(20)}
    assert len(found) == 20
    assert all(0.9 * RESYNC_S <= seconds <= 1.1 * RESYNC_S for seconds in found)


def test_a_pass_that_acted_is_followed_at_once_and_a_quarrel_becomes_slower() -> None:
    pace = make_pace()
    found = [acts(pace) for _ in range(20)]
    assert found[0] < 0.1
    assert found == sorted(found)
    assert found[-1] == LONGEST_AGAIN_S
    waits(pace, 0.0)
    assert acts(pace) == found[0]


def test_a_plan_may_ask_for_sooner_in_a_roll_but_not_in_a_quarrel() -> None:
    pace = make_pace()
    found = [acts(pace, asked_s=0.05) for _ in range(20)]
    assert max(found[:7]) <= 0.05
    assert found[-1] == LONGEST_AGAIN_S


def test_waiting_in_vain_becomes_rarer_until_there_is_news() -> None:
    pace = make_pace()
    assert [waits(pace, 5.0) for _ in range(5)] == [5.0, 10.0, 20.0, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert waits(pace, 5.0, news=True) == 5.0
    assert waits(pace, 5.0) == 5.0
    assert waits(pace, 100.0) == 100.0


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 400)), max_size=40))
def test_there_is_always_a_next_pass_and_never_at_full_speed_for_ever(steps: list[tuple[bool, bool, float]]) -> None:
    pace = make_pace()
    for acted, news, asked_s in steps:
        assert 0 < pace.next_s("a", acted=acted, news=news, asked_s=asked_s) <= 400
