"""Unit tests of the election: the decision, and two operators around one Lease in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.controller.leadership import Leadership, OpenFence, since_boot
from kvtier_operator.controller.lease import (
    DURATION_S,
    RENEW_WITHIN_S,
    Lease,
    Sighting,
    Step,
    decide,
    lease_manifest,
    read_lease,
)
from kvtier_operator.errors import NotLeader
from kvtier_operator.kinds import LEASE_KIND
from kvtier_operator.testing.faulty_cluster import Fault, FaultyCluster
from kvtier_operator.testing.memory_cluster import MemoryCluster

PLACE = ("ops", "kvtier-operator")


@pytest.mark.parametrize(
    ("lease", "age_s", "step"),
    [
        (None, 0.0, Step.CREATE),
        (Lease("me", 15, "1"), 100.0, Step.RENEW),
        (Lease("", 15, "1"), 0.0, Step.TAKE),
        (Lease("other", 15, "1"), 14.9, Step.WAIT),
        (Lease("other", 15, "1"), 15.0, Step.TAKE),
        (Lease("other", 30, "1"), 20.0, Step.WAIT),
    ],
)
def test_the_decision_follows_holder_and_age(lease: Lease | None, age_s: float, step: Step) -> None:
    assert decide(Sighting(lease, 50.0), "me", 50.0 + age_s) is step


def test_an_expiry_counts_from_the_last_change_that_we_saw() -> None:
    sighting = Sighting(Lease("other", 15, "1"), 0.0)
    renewed = sighting.next(Lease("other", 15, "2"), 14.0)
    assert decide(renewed, "me", 28.0) is Step.WAIT
    assert decide(renewed.next(Lease("other", 15, "2"), 29.0), "me", 29.0) is Step.TAKE


def test_a_takeover_counts_a_transition_and_a_renewal_keeps_its_beginning() -> None:
    former = Lease("other", 15, "7", acquired="2026-01-01T00:00:00.000000Z", transitions=3)
    taken = lease_manifest(PLACE, Step.TAKE, former, "me", 1.0)
    assert taken["spec"]["leaseTransitions"] == 4
    assert taken["metadata"]["resourceVersion"] == "7"
    body = {**taken, "metadata": {**taken["metadata"], "resourceVersion": "8"}}
    renewed = lease_manifest(PLACE, Step.RENEW, read_lease(body), "me", 99.0)
    assert renewed["spec"]["acquireTime"] == taken["spec"]["acquireTime"]
    assert renewed["spec"]["renewTime"] != taken["spec"]["renewTime"]


def test_the_lease_runs_out_while_the_machine_sleeps() -> None:
    leadership = Leadership(MemoryCluster(), PLACE, "me", lambda _leads: None)
    assert leadership.clock is since_boot
    before = since_boot()
    # The kernel's own measure of time since the start, with every sleep.
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    assert before - 0.1 <= uptime_s <= since_boot() + 0.1
    assert since_boot() >= time.monotonic() - 0.1


@dataclass
class Time:
    """A clock that a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pair:
    """Two operators with one Lease."""

    time: Time = field(default_factory=Time)
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    said: list[tuple[str, bool]] = field(default_factory=list)

    def operator(self, name: str, api: MemoryCluster | FaultyCluster | None = None) -> Leadership:
        return Leadership(
            api or self.cluster, PLACE, name, lambda leads: self.said.append((name, leads)), self.time, self.time
        )


def leads(operator: Leadership) -> bool:
    """Whether it may write now."""
    return operator.leading


def test_the_first_leads_and_the_second_stands_by() -> None:
    pair = Pair()
    one, two = pair.operator("one"), pair.operator("two")
    asyncio.run(one.take_part())
    asyncio.run(two.take_part())
    assert (leads(one), leads(two)) == (True, False)
    assert pair.said == [("one", True)]
    with pytest.raises(NotLeader):
        two.check()


def test_the_leader_may_not_write_any_more_before_another_one_may() -> None:
    pair = Pair()
    one, two = pair.operator("one"), pair.operator("two")
    asyncio.run(one.take_part())
    asyncio.run(two.take_part())
    pair.time.now = RENEW_WITHIN_S
    with pytest.raises(NotLeader):
        one.check()
    asyncio.run(two.take_part())
    assert not leads(two)
    pair.time.now = DURATION_S
    asyncio.run(two.take_part())
    assert leads(two)
    asyncio.run(one.take_part())
    assert not leads(one)
    assert pair.said == [("one", True), ("two", True), ("one", False)]


def test_a_write_may_last_until_another_one_may_lead_and_no_longer() -> None:
    pair = Pair()
    one = pair.operator("one")
    asyncio.run(one.take_part())
    pair.time.now = RENEW_WITHIN_S - 0.5
    one.check()
    assert pair.time.now + one.remaining_s() == DURATION_S
    assert OpenFence().remaining_s() == float("inf")


def test_a_server_that_does_not_answer_ends_the_leadership_in_time_and_an_answer_brings_it_back() -> None:
    pair = Pair()
    api = FaultyCluster(pair.cluster)
    one = pair.operator("one", api)
    asyncio.run(one.take_part())
    api.faults = deque([Fault.BROKEN] * 3)
    for now in (4.0, 8.0, 12.0):
        pair.time.now = now
        asyncio.run(one.take_part())
    assert not leads(one)
    pair.time.now = 13.0
    asyncio.run(one.take_part())
    assert leads(one)
    assert pair.said == [("one", True), ("one", False), ("one", True)]


def test_of_two_that_see_an_expired_lease_only_one_gets_it() -> None:
    pair = Pair()
    asyncio.run(pair.operator("gone").take_part())
    one, two = pair.operator("one"), pair.operator("two")
    for operator in (one, two):
        asyncio.run(operator.take_part())
    pair.time.now = DURATION_S
    stale = asyncio.run(pair.cluster.get(LEASE_KIND, *PLACE))
    asyncio.run(one.take_part())

    class Late(MemoryCluster):
        """Shows `two` the Lease as it was before `one` took it."""

        async def get(self, *_: object) -> dict[str, object] | None:
            return stale

    two.cluster = Late(pair.cluster.objects)
    asyncio.run(two.take_part())
    assert (leads(one), leads(two)) == (True, False)


def test_who_stops_cleanly_leaves_the_lease_free_at_once() -> None:
    pair = Pair()
    one, two = pair.operator("one"), pair.operator("two")

    async def run_and_stop() -> None:
        chosen = asyncio.Event()
        one.changed = lambda _leads: chosen.set()
        task = asyncio.create_task(one.run())
        await chosen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run_and_stop())
    assert not leads(one)
    asyncio.run(two.take_part())
    assert leads(two)


@given(st.lists(st.tuples(st.floats(0, 6), st.sampled_from(["one", "two"]), st.booleans()), max_size=60))
def test_no_two_operators_may_write_at_the_same_time(steps: list[tuple[float, str, bool]]) -> None:
    pair = Pair()
    apis = {name: FaultyCluster(pair.cluster) for name in ("one", "two")}
    operators = {name: pair.operator(name, apis[name]) for name in apis}

    async def play() -> None:
        for step_s, name, fails in steps:
            pair.time.now += step_s
            apis[name].faults = deque([Fault.LOST_AFTER] if fails else [])
            await operators[name].take_part()
            assert sum(leads(operator) for operator in operators.values()) <= 1

    asyncio.run(play())
