"""Restart at once, then later and later, and give up when nothing helps."""

from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.local.restarts import CALM_S, DELAYS_S, failures_in_a_row, restart_delay


def test_the_first_restart_is_immediate_and_the_others_wait_longer_each_time_until_none_is_left() -> None:
    delays = [restart_delay(failures) for failures in range(1, len(DELAYS_S) + 2)]
    assert delays[0] == 0
    assert delays[:-1] == sorted(DELAYS_S)
    assert delays[-1] is None


def test_a_calm_while_starts_a_new_row() -> None:
    assert failures_in_a_row(4, ready_s=CALM_S) == 1
    assert failures_in_a_row(4, ready_s=CALM_S - 1) == 5


@given(st.lists(st.floats(0, 2 * CALM_S), min_size=1, max_size=30))
def test_it_gives_up_exactly_after_too_many_failures_without_a_calm(ready: list[float]) -> None:
    failures, given_up = 0, False
    for ready_s in ready:
        failures = failures_in_a_row(failures, ready_s)
        given_up = given_up or restart_delay(failures) is None
    rows = [0]
    for ready_s in ready:
        rows = [*rows, 1] if ready_s >= CALM_S else [*rows[:-1], rows[-1] + 1]
    assert given_up == any(row > len(DELAYS_S) for row in rows)
