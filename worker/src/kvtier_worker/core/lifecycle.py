"""The lives of a request, a prefetch job and a write-back job, as transition tables and one function.

    request     PREFETCHING ─► WAITING ◄─► RUNNING ─► FINISHED
                     │            │           │
                     ▼            ▼           ▼
                 STOPPING ─► CANCELLED ◄─ STOPPING       FAILED from every state that is not an end
    prefetch    ISSUING ─► DRAINING ─► PUBLISHED | ABANDONED
    writeback   QUEUED ─► COPYING ─► STORING ─► DONE
                             └─────► ABORTING ─► ABORTED

Whoever holds a state replaces it by ``advance(TABLE, state, event)`` and by nothing else. An event that the table
lacks is a bug of ours; what may come late from outside is checked by the caller, who knows whether it still matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from kvtier_worker.errors import IntegrityError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def advance(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        IntegrityError: the table does not allow it.
    """
    try:
        return table[state, event]
    except KeyError:
        msg = f"{type(state).__name__}: {event} is not allowed in state {state}"
        raise IntegrityError(msg) from None


def is_terminal(table: Mapping[tuple[State, Event], State], state: State) -> bool:
    """Whether nothing can happen after ``state``."""
    return all(source is not state for source, _ in table)


class RequestState(StrEnum):
    """Where a request is. A preempted request is WAITING again."""

    PREFETCHING = "prefetching"  # store -> host in flight; holds host slots, no device block
    WAITING = "waiting"  # ready to be scheduled; holds no device block
    RUNNING = "running"  # holds device blocks
    STOPPING = "stopping"  # cancelled; its prefetch batches or its step in flight still touch its blocks
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RequestEvent(StrEnum):
    """What happens to a request."""

    PREFETCH_ENDED = "prefetch_ended"  # every rank is done and nothing of it is in flight, or its time is up
    SCHEDULED = "scheduled"  # device blocks leased
    PREEMPTED = "preempted"  # device blocks released between steps
    RESTORE_ABORTED = "restore_aborted"  # a step that it depends on failed to restore; blocks released
    FINISHED = "finished"  # stop condition met
    CANCELLED = "cancelled"  # the client is gone or said so
    QUIESCED = "quiesced"  # nothing in flight touches its blocks any more
    FAILED = "failed"  # its step failed, or its workers are gone: nothing in flight


REQUEST_TABLE: Mapping[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.PREFETCHING, RequestEvent.PREFETCH_ENDED): RequestState.WAITING,
    (RequestState.PREFETCHING, RequestEvent.CANCELLED): RequestState.STOPPING,
    (RequestState.PREFETCHING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.WAITING, RequestEvent.SCHEDULED): RequestState.RUNNING,
    (RequestState.WAITING, RequestEvent.CANCELLED): RequestState.CANCELLED,
    (RequestState.WAITING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.RUNNING, RequestEvent.PREEMPTED): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.RESTORE_ABORTED): RequestState.WAITING,
    (RequestState.RUNNING, RequestEvent.FINISHED): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.CANCELLED): RequestState.STOPPING,
    (RequestState.RUNNING, RequestEvent.FAILED): RequestState.FAILED,
    (RequestState.STOPPING, RequestEvent.CANCELLED): RequestState.STOPPING,
    (RequestState.STOPPING, RequestEvent.QUIESCED): RequestState.CANCELLED,
    (RequestState.STOPPING, RequestEvent.FAILED): RequestState.FAILED,
}


class PrefetchState(StrEnum):
    """Where a prefetch job is. It holds its host slots until PUBLISHED or ABANDONED."""

    ISSUING = "issuing"  # more batches will be sent
    DRAINING = "draining"  # no more will be sent; those in flight still write into host memory
    PUBLISHED = "published"  # hits are findable in the host pool, misses are free
    ABANDONED = "abandoned"  # nothing published, all slots released


class PrefetchEvent(StrEnum):
    """What happens to a prefetch job."""

    EXHAUSTED = "exhausted"  # every batch was sent on every rank
    STOP = "stop"  # deadline or cancel: send no more
    MERGED = "merged"  # every rank is done and somebody can use it
    DISCARDED = "discarded"  # every rank is done and the request was cancelled


PREFETCH_TABLE: Mapping[tuple[PrefetchState, PrefetchEvent], PrefetchState] = {
    (PrefetchState.ISSUING, PrefetchEvent.EXHAUSTED): PrefetchState.DRAINING,
    (PrefetchState.ISSUING, PrefetchEvent.STOP): PrefetchState.DRAINING,
    (PrefetchState.DRAINING, PrefetchEvent.STOP): PrefetchState.DRAINING,
    (PrefetchState.DRAINING, PrefetchEvent.MERGED): PrefetchState.PUBLISHED,
    (PrefetchState.DRAINING, PrefetchEvent.DISCARDED): PrefetchState.ABANDONED,
}


class WritebackState(StrEnum):
    """Where a write-back job is.

    It holds its device blocks until it leaves COPYING, its host slots until DONE or ABORTED.
    """

    QUEUED = "queued"  # planned, not sent
    COPYING = "copying"  # device -> host in flight on some rank
    STORING = "storing"  # whole on every rank, published on the host; the store still reads host memory
    ABORTING = "aborting"  # a rank failed to copy: publish nothing; ranks may still read host memory
    DONE = "done"
    ABORTED = "aborted"


class WritebackEvent(StrEnum):
    """What happens to a write-back job."""

    SENT = "sent"
    DISCARDED = "discarded"  # never sent
    COPIED = "copied"  # every rank copied the expected count
    COPY_FAILED = "copy_failed"  # every rank answered, at least one badly
    STORED = "stored"  # every rank ended its put, well or badly
    WORKERS_LOST = "workers_lost"  # nothing in flight any more, no answer will come


WRITEBACK_TABLE: Mapping[tuple[WritebackState, WritebackEvent], WritebackState] = {
    (WritebackState.QUEUED, WritebackEvent.SENT): WritebackState.COPYING,
    (WritebackState.QUEUED, WritebackEvent.DISCARDED): WritebackState.ABORTED,
    (WritebackState.COPYING, WritebackEvent.COPIED): WritebackState.STORING,
    (WritebackState.COPYING, WritebackEvent.COPY_FAILED): WritebackState.ABORTING,
    (WritebackState.COPYING, WritebackEvent.WORKERS_LOST): WritebackState.ABORTED,
    (WritebackState.STORING, WritebackEvent.STORED): WritebackState.DONE,
    (WritebackState.STORING, WritebackEvent.WORKERS_LOST): WritebackState.DONE,
    (WritebackState.ABORTING, WritebackEvent.STORED): WritebackState.ABORTED,
    (WritebackState.ABORTING, WritebackEvent.WORKERS_LOST): WritebackState.ABORTED,
}
