"""The transition tables: what is reachable, where everything ends, and what must not happen."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from kvtier_worker.core.lifecycle import (
    PREFETCH_TABLE,
    REQUEST_TABLE,
    WRITEBACK_TABLE,
    PrefetchEvent,
    PrefetchState,
    RequestEvent,
    RequestState,
    WritebackEvent,
    WritebackState,
    advance,
    is_terminal,
)
from kvtier_worker.errors import IntegrityError

Table = Mapping[Any, Any]
TABLES = [
    pytest.param(REQUEST_TABLE, RequestState, RequestEvent, "FINISHED CANCELLED FAILED", id="request"),
    pytest.param(PREFETCH_TABLE, PrefetchState, PrefetchEvent, "PUBLISHED ABANDONED", id="prefetch"),
    pytest.param(WRITEBACK_TABLE, WritebackState, WritebackEvent, "DONE ABORTED", id="writeback"),
]


def reachable(table: Table, start: StrEnum) -> set[StrEnum]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        new = {target for (source, _), target in table.items() if source is state} - seen
        seen |= new
        todo += new
    return seen


@pytest.mark.parametrize(("table", "states", "events", "ends"), TABLES)
def test_every_state_is_reachable_and_every_event_is_used(
    table: Table, states: type[StrEnum], events: type[StrEnum], ends: str
) -> None:
    start = next(iter(states))
    assert reachable(table, start) == set(states)
    assert {event for _, event in table} == set(events)
    assert {state for state in states if is_terminal(table, state)} == {states[name] for name in ends.split()}


@pytest.mark.parametrize(("table", "states", "events", "ends"), TABLES)
def test_an_end_can_be_reached_from_everywhere(
    table: Table, states: type[StrEnum], events: type[StrEnum], ends: str
) -> None:
    for state in states:
        assert reachable(table, state) & {states[name] for name in ends.split()}


@pytest.mark.parametrize(("table", "states", "events", "ends"), TABLES)
def test_what_the_table_lacks_is_refused(table: Table, states: type[StrEnum], events: type[StrEnum], ends: str) -> None:
    for state in states:
        for event in events:
            if (state, event) in table:
                assert advance(table, state, event) is table[state, event]
            else:
                with pytest.raises(IntegrityError, match=f"{event} is not allowed in state {state}"):
                    advance(table, state, event)


def walk(state: RequestState, *events: RequestEvent) -> RequestState:
    for event in events:
        state = advance(REQUEST_TABLE, state, event)
    return state


def test_a_request_that_is_preempted_waits_and_runs_again() -> None:
    event = RequestEvent
    assert (
        walk(RequestState.PREFETCHING, event.PREFETCH_ENDED, event.SCHEDULED, event.PREEMPTED, event.SCHEDULED)
        is RequestState.RUNNING
    )


@pytest.mark.parametrize("busy", [RequestState.PREFETCHING, RequestState.RUNNING])
def test_a_cancelled_request_keeps_its_blocks_until_nothing_touches_them(busy: RequestState) -> None:
    stopping = walk(busy, RequestEvent.CANCELLED)
    assert stopping is RequestState.STOPPING
    assert walk(stopping, RequestEvent.CANCELLED) is RequestState.STOPPING
    assert walk(stopping, RequestEvent.QUIESCED) is RequestState.CANCELLED


def test_a_cancelled_request_is_never_scheduled() -> None:
    after_cancel = reachable(REQUEST_TABLE, RequestState.STOPPING) | reachable(REQUEST_TABLE, RequestState.CANCELLED)
    assert not after_cancel & {RequestState.WAITING, RequestState.RUNNING, RequestState.FINISHED}


def test_a_waiting_request_is_never_prefetched_again() -> None:
    assert RequestState.PREFETCHING not in reachable(REQUEST_TABLE, RequestState.WAITING)


def test_a_prefetch_publishes_only_after_it_drained() -> None:
    into = {source for (source, _), target in PREFETCH_TABLE.items() if target is PrefetchState.PUBLISHED}
    assert into == {PrefetchState.DRAINING}
    assert PrefetchState.ISSUING not in reachable(PREFETCH_TABLE, PrefetchState.DRAINING)


def test_a_writeback_that_failed_on_a_rank_is_never_published() -> None:
    after_failure = reachable(WRITEBACK_TABLE, WritebackState.ABORTING)
    assert not after_failure & {WritebackState.STORING, WritebackState.DONE}


def test_host_slots_of_a_failed_writeback_are_held_until_the_ranks_answered() -> None:
    failed = advance(WRITEBACK_TABLE, WritebackState.COPYING, WritebackEvent.COPY_FAILED)
    assert not is_terminal(WRITEBACK_TABLE, failed)
    assert advance(WRITEBACK_TABLE, failed, WritebackEvent.STORED) is WritebackState.ABORTED
