"""The circuit breaker, in numbers of seconds that nobody waits for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.adapters.mooncake_store.breaker import (
    Admission,
    BreakerPolicy,
    BreakerState,
    CallResult,
    CircuitBreaker,
)

POLICY = BreakerPolicy(max_faults=3, costly_fault_s=0.5, costly_call_s=5.0, first_pause_s=1.0, max_pause_s=4.0)


def call(breaker: CircuitBreaker, result: CallResult, now: float, elapsed_s: float = 0.0) -> Admission:
    admission = breaker.admit(now)
    if admission is not Admission.REFUSED:
        breaker.record(admission, result, elapsed_s, now + elapsed_s)
    return admission


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    for _ in range(POLICY.max_faults):
        call(breaker, CallResult.DATA_FAULT, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_after_three_faults_in_a_row() -> None:
    breaker = CircuitBreaker(POLICY)
    for expected in (BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN):
        call(breaker, CallResult.DATA_FAULT, 0.0)
        assert breaker.state is expected


def test_an_answer_between_faults_starts_the_count_again() -> None:
    breaker = CircuitBreaker(POLICY)
    for result in (CallResult.DATA_FAULT, CallResult.DATA_FAULT, CallResult.ANSWERED) * 5:
        call(breaker, result, 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_one_costly_fault_of_the_master_opens_it() -> None:
    breaker = CircuitBreaker(POLICY)
    call(breaker, CallResult.CONTROL_FAULT, 0.0, elapsed_s=4.3)
    assert breaker.state is BreakerState.OPEN


def test_one_slow_fault_of_a_storage_node_does_not_open_it() -> None:
    breaker = CircuitBreaker(POLICY)
    call(breaker, CallResult.DATA_FAULT, 0.0, elapsed_s=1.0)
    assert breaker.state is BreakerState.CLOSED


def test_one_call_beyond_the_deadline_opens_it_even_if_it_was_answered() -> None:
    breaker = CircuitBreaker(POLICY)
    call(breaker, CallResult.ANSWERED, 0.0, elapsed_s=5.0)
    assert breaker.state is BreakerState.OPEN


def test_after_an_unanswered_call_the_next_one_looks_first() -> None:
    breaker = CircuitBreaker(POLICY)
    call(breaker, CallResult.CONTROL_FAULT, 0.0)
    assert breaker.admit(0.0) is Admission.DOUBTFUL
    breaker.record(Admission.DOUBTFUL, CallResult.ANSWERED, 0.0, 0.0)
    assert breaker.admit(0.0) is Admission.NORMAL


def test_a_look_that_finds_nobody_opens_it() -> None:
    breaker = CircuitBreaker(POLICY)
    call(breaker, CallResult.CONTROL_FAULT, 0.0)
    call(breaker, CallResult.UNREACHABLE, 0.0)
    assert breaker.state is BreakerState.OPEN


def test_while_open_nobody_asks() -> None:
    breaker = opened(now=10.0)
    assert [breaker.admit(now) for now in (10.0, 10.5, 10.999)] == [Admission.REFUSED] * 3


def test_after_the_pause_exactly_one_call_tries() -> None:
    breaker = opened(now=10.0)
    assert breaker.admit(11.0) is Admission.TRIAL
    assert breaker.state is BreakerState.HALF_OPEN
    assert [breaker.admit(11.0), breaker.admit(99.0)] == [Admission.REFUSED] * 2


def test_a_trial_that_works_closes_it() -> None:
    breaker = opened()
    assert call(breaker, CallResult.ANSWERED, 1.0) is Admission.TRIAL
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit(1.0) is Admission.NORMAL


def test_every_failed_trial_doubles_the_pause_up_to_its_limit() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(4):
        start = now
        while breaker.admit(now) is Admission.REFUSED:
            now += 0.5
        pauses.append(now - start)
        breaker.record(Admission.TRIAL, CallResult.CONTROL_FAULT, 0.0, now)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


def test_the_pause_is_short_again_after_it_closed() -> None:
    breaker = opened()
    call(breaker, CallResult.DATA_FAULT, 1.0)
    call(breaker, CallResult.ANSWERED, 3.0)
    for _ in range(3):
        call(breaker, CallResult.DATA_FAULT, 3.0)
    assert breaker.admit(3.9) is Admission.REFUSED
    assert breaker.admit(4.0) is Admission.TRIAL


def test_a_late_result_of_a_call_from_before_changes_nothing() -> None:
    breaker = CircuitBreaker(POLICY)
    late = breaker.admit(0.0)
    call(breaker, CallResult.CONTROL_FAULT, 0.0, elapsed_s=1.0)
    breaker.record(late, CallResult.ANSWERED, 1.5, 1.5)
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(1.9) is Admission.REFUSED
    assert breaker.admit(2.0) is Admission.TRIAL
    breaker.record(late, CallResult.CONTROL_FAULT, 9.0, 9.0)
    assert breaker.admit(99.0) is Admission.REFUSED  # the trial is still under way


@given(
    st.lists(st.tuples(st.sampled_from(CallResult), st.floats(0, 6), st.floats(0, 3)), max_size=60),
)
def test_a_store_that_is_back_is_found_within_the_longest_pause(
    history: list[tuple[CallResult, float, float]],
) -> None:
    breaker, now = CircuitBreaker(POLICY), 0.0
    for result, elapsed_s, gap_s in history:
        now += gap_s
        call(breaker, result, now, elapsed_s)
        now += elapsed_s
    admission = call(breaker, CallResult.ANSWERED, now + POLICY.max_pause_s)
    assert admission is not Admission.REFUSED
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.tuples(st.sampled_from(CallResult), st.floats(0, 6)), max_size=60), st.integers(2, 8))
def test_a_half_open_breaker_has_one_call_in_flight(history: list[tuple[CallResult, float]], callers: int) -> None:
    breaker, now = CircuitBreaker(POLICY), 0.0
    for result, elapsed_s in history:
        admissions = [breaker.admit(now) for _ in range(callers)]
        assert admissions.count(Admission.TRIAL) <= 1
        if Admission.TRIAL in admissions:
            assert admissions.count(Admission.NORMAL) == 0
        for admission in admissions:
            if admission is not Admission.REFUSED:
                breaker.record(admission, result, elapsed_s, now + elapsed_s)
        now += elapsed_s + 0.25
