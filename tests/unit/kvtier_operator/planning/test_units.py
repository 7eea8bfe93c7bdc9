from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.planning.units import Step, Units, next_step

SIZES = st.integers(0, 6)
WANTED = st.fixed_dictionaries({"p": SIZES, "d": SIZES})


def walk(units: Units, old: Mapping[str, int], max_surge: int) -> list[Step]:
    """Every step of a rollout in which each new pod becomes ready before the next look."""
    steps = [Step(dict.fromkeys(units.wanted, 0), old)]
    while len(steps) < 100:
        last = steps[-1]
        step = next_step(units, new=last.new, ready=last.new, old=last.old, max_surge=max_surge)
        if step == last:
            return steps
        steps.append(step)
    raise AssertionError(f"no end: {steps[:6]}")


def pairs(steps: list[Step], role: str) -> list[tuple[int, int]]:
    return [(step.new[role], step.old[role]) for step in steps]


def test_without_surge_a_unit_leaves_before_its_successor_comes() -> None:
    steps = walk(Units({"e": 3}, paired=False), {"e": 3}, max_surge=0)
    assert pairs(steps, "e") == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_with_surge_a_unit_leaves_when_its_successor_is_ready() -> None:
    steps = walk(Units({"e": 3}, paired=False), {"e": 3}, max_surge=1)
    assert pairs(steps, "e") == [(0, 3), (1, 3), (2, 2), (3, 1), (3, 0)]


def test_prefill_and_decode_go_together_in_their_ratio() -> None:
    steps = walk(Units({"p": 2, "d": 6}, paired=True), {"p": 2, "d": 6}, max_surge=0)
    assert [(step.new["p"], step.new["d"]) for step in steps] == [(0, 0), (1, 3), (2, 6)]
    assert [(step.old["p"], step.old["d"]) for step in steps] == [(2, 6), (1, 3), (0, 0)]


def test_a_ratio_without_a_divisor_is_kept_as_near_as_whole_pods_allow() -> None:
    steps = walk(Units({"p": 3, "d": 8}, paired=True), {"p": 3, "d": 8}, max_surge=0)
    assert [(step.new["p"], step.new["d"]) for step in steps] == [(0, 0), (1, 2), (2, 5), (3, 8)]


def test_fused_roles_of_different_size_go_pod_by_pod_each() -> None:
    steps = walk(Units({"a": 1, "b": 3}, paired=False), {"a": 1, "b": 3}, max_surge=0)
    assert pairs(steps, "a") == [(0, 1), (1, 0), (1, 0), (1, 0)]
    assert pairs(steps, "b") == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_the_only_engine_is_replaced_with_and_without_surge() -> None:
    units = Units({"e": 1}, paired=False)
    assert pairs(walk(units, {"e": 1}, 0), "e") == [(0, 1), (1, 0)]
    assert pairs(walk(units, {"e": 1}, 1), "e") == [(0, 1), (1, 1), (1, 0)]


def test_nothing_goes_on_while_the_last_unit_is_not_ready() -> None:
    units = Units({"e": 4}, paired=False)
    step = next_step(units, new={"e": 2}, ready={"e": 1}, old={"e": 2}, max_surge=0)
    assert step == Step({"e": 2}, {"e": 2})


def test_half_a_unit_is_completed_first() -> None:
    """The operator died between two roles."""
    units = Units({"p": 2, "d": 2}, paired=True)
    step = next_step(units, new={"p": 1, "d": 0}, ready={"p": 1}, old={"p": 1, "d": 2}, max_surge=0)
    assert step == Step({"p": 1, "d": 1}, {"p": 1, "d": 1})


def test_a_dropped_role_serves_until_the_others_have_taken_over() -> None:
    units = Units({"fused": 3}, paired=False)
    steps = walk(units, {"p": 2, "d": 4}, max_surge=0)
    assert [(step.new["fused"], step.old["p"], step.old["d"]) for step in steps] == [
        (0, 2, 4),
        (1, 2, 2),
        (2, 1, 1),
        (3, 0, 0),
    ]


@pytest.mark.parametrize(("replicas", "surge"), list(product(range(7), range(7))))
def test_every_rollout_of_one_role_ends_and_keeps_its_promise(replicas: int, surge: int) -> None:
    steps = walk(Units({"e": replicas}, paired=False), {"e": replicas}, surge)
    assert steps[-1] == Step({"e": replicas}, {"e": 0})
    for step in steps:
        total = step.new["e"] + step.old["e"]
        assert replicas - (surge == 0) <= total <= replicas + surge


@given(wanted=WANTED, old=WANTED, max_surge=SIZES, paired=st.booleans())
def test_any_rollout_ends_with_the_wanted_pods_and_no_old_one(
    wanted: dict[str, int], old: dict[str, int], max_surge: int, *, paired: bool
) -> None:
    steps = walk(Units(wanted, paired), old, max_surge)
    assert steps[-1].new == wanted
    assert set(steps[-1].old.values()) <= {0}


@given(wanted=WANTED, ready=WANTED, old=WANTED, max_surge=SIZES)
def test_each_step_keeps_the_promise_in_ready_pods(
    wanted: dict[str, int], ready: dict[str, int], old: dict[str, int], max_surge: int
) -> None:
    """Whatever has happened before: what a step leaves is enough, or it takes nothing."""
    units = Units(wanted, paired=True)
    step = next_step(units, new=ready, ready=ready, old=old, max_surge=max_surge)
    for role, size in wanted.items():
        unit = -(-size // units.total) if units.total else 0
        floor = size if max_surge else size - unit
        assert min(ready[role], size) + step.old[role] >= min(floor, ready[role] + old[role])


@given(wanted=WANTED, done=SIZES, max_surge=SIZES)
def test_a_unit_has_both_roles(wanted: dict[str, int], done: int, max_surge: int) -> None:
    units = Units(wanted, paired=True)
    new = {role: units.at(role, min(done, units.total)) for role in wanted}
    step = next_step(units, new=new, ready=new, old=wanted, max_surge=max_surge)
    if all(wanted.values()):
        assert bool(step.new["p"]) == bool(step.new["d"])
