"""Unit tests of the queue of clusters, in virtual time."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvtier_operator.controller.work_queue import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, WorkQueue


def make_queue() -> WorkQueue[str]:
    return WorkQueue(Random(1))


def test_a_key_that_is_added_often_is_handed_out_once() -> None:
    queue = make_queue()
    for at in (3.0, 1.0, 2.0):
        queue.add("a", at)
    assert queue.take(0.5) is None
    assert queue.next_due() == 1.0
    assert queue.take(1.0) == "a"
    assert queue.take(9.0) is None


def test_keys_come_in_the_order_in_which_they_became_due() -> None:
    queue = make_queue()
    queue.add("late", 2.0)
    queue.add("early", 1.0)
    assert [queue.take(5.0), queue.take(5.0)] == ["early", "late"]


def test_a_key_is_never_handed_out_twice_at_once_but_again_afterwards() -> None:
    queue = make_queue()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 1.0)
    assert queue.take(2.0) is None
    assert queue.next_due() is None
    queue.done("a")
    assert queue.take(2.0) == "a"


def test_failures_wait_longer_each_time_and_success_forgets_them() -> None:
    queue = make_queue()
    waits = []
    for _ in range(12):
        queue.add("a", 0.0)
        assert queue.take(1e9) == "a"
        waits.append(queue.failed("a", 0.0))
        queue.forget("x")
    assert FIRST_BACKOFF_S / 2 <= waits[0] <= FIRST_BACKOFF_S
    assert waits[4] > waits[0]
    assert LONGEST_BACKOFF_S / 2 <= waits[-1] <= LONGEST_BACKOFF_S
    assert queue.take(1e9) == "a"
    queue.done("a")
    queue.add("a", 0.0)
    queue.take(0.0)
    assert queue.failed("a", 0.0) <= FIRST_BACKOFF_S


def test_the_server_s_wish_to_wait_is_respected_even_when_news_arrives() -> None:
    queue = make_queue()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.0)
    assert queue.failed("a", 0.0, at_least_s=7.0) >= 7.0
    assert queue.take(6.9) is None


def test_depth_and_age_tell_how_far_behind_the_workers_are() -> None:
    queue = make_queue()
    queue.add("a", 1.0)
    queue.add("b", 3.0)
    queue.add("c", 100.0)
    assert (queue.depth(5.0), queue.oldest_age_s(5.0)) == (2, 4.0)
    queue.take(5.0)
    assert (queue.depth(5.0), queue.oldest_age_s(5.0)) == (1, 2.0)


def test_a_forgotten_key_is_not_handed_out() -> None:
    queue = make_queue()
    queue.add("a", 0.0)
    queue.forget("a")
    assert queue.take(1.0) is None
    assert queue.next_due() is None


@given(st.integers(0, 2**32 - 1))
def test_backoffs_of_many_keys_do_not_come_back_together(seed: int) -> None:
    queue: WorkQueue[int] = WorkQueue(Random(seed))
    for key in range(20):
        queue.add(key, 0.0)
        queue.take(0.0)
    waits = {queue.failed(key, 0.0) for key in range(20)}
    assert len(waits) > 10


class QueueMachine(RuleBasedStateMachine):
    """Any use of the queue, against a plain model: which keys are due, and which are out."""

    @initialize()
    def begin(self) -> None:
        self.queue: WorkQueue[int] = WorkQueue(Random(0))
        self.now = 0.0
        self.due: dict[int, float] = {}
        self.out: set[int] = set()

    @rule(key=st.integers(0, 4), delay=st.floats(0, 10))
    def add(self, key: int, delay: float) -> None:
        at = self.now + delay
        self.queue.add(key, at)
        self.due[key] = min(at, self.due.get(key, at))

    @rule(step=st.floats(0, 5))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule()
    def take(self) -> None:
        key = self.queue.take(self.now)
        ready = {key: at for key, at in self.due.items() if key not in self.out and at <= self.now}
        assert (key is None) == (not ready)
        if key is not None:
            assert ready[key] == min(ready.values())
            del self.due[key]
            self.out.add(key)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.out)))
        self.out.remove(key)
        if data.draw(st.booleans()):
            self.queue.done(key)
        else:
            self.due[key] = self.now + self.queue.failed(key, self.now)

    @rule(key=st.integers(0, 4))
    def forget(self, key: int) -> None:
        self.queue.forget(key)
        self.due.pop(key, None)

    @invariant()
    def next_due_is_that_of_the_model(self) -> None:
        waiting = [at for key, at in self.due.items() if key not in self.out]
        expected = min(waiting, default=None)
        assert self.queue.next_due() == (None if expected is None else pytest.approx(expected))


TestQueueMachine = QueueMachine.TestCase
