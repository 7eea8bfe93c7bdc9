"""One prefetch job: what it reads, what it waits for, how far it is, and how it ended. Records for `admission`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvtier_worker.core.hits import HitMatrix
from kvtier_worker.core.ids import JobId
from kvtier_worker.core.lifecycle import PREFETCH_TABLE, PrefetchEvent, PrefetchState, RequestState, advance
from kvtier_worker.engine.host_tier import FetchNeed
from kvtier_worker.engine.requests import LiveRequest


class PrefetchOutcome(StrEnum):
    """How a prefetch ended, for the metrics."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """One ended prefetch."""

    outcome: PrefetchOutcome
    num_asked: int
    num_hits: int
    seconds: float


@dataclass(slots=True)
class PrefetchJob:
    """One job in flight.

    Attributes:
        need: what it reads and what it waits for; once it stopped, what of that was sent.
        live: whom it is for; cancelled ones stay until nothing is in flight.
        started: clock at its start.
        deadline: clock after which it issues nothing and its request does not wait; None = never.
        matrix: what the ranks reported of all it was to read; None when it only waits for other jobs.
        issued: items sent so far.
        in_flight: ranks that have not answered, by offset of a batch sent.
        awaited: blocks that other jobs fetch.
        waiters: jobs that wait for this one.
        why: the outcome if it was stopped early for another reason than a miss.
        left: its request went on without it.
    """

    job_id: JobId
    need: FetchNeed
    live: LiveRequest
    started: float
    deadline: float | None
    matrix: HitMatrix | None
    awaited: dict[JobId, tuple[int, ...]]
    state: PrefetchState = PrefetchState.ISSUING
    issued: int = 0
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    waiters: set[JobId] = field(default_factory=set)
    why: PrefetchOutcome | None = None
    left: bool = False

    def apply(self, event: PrefetchEvent) -> None:
        """Move to the state that the table names."""
        self.state = advance(PREFETCH_TABLE, self.state, event)

    @property
    def issuing(self) -> bool:
        """Whether it may send more."""
        return self.state is PrefetchState.ISSUING

    def stop(self) -> None:
        """Send nothing more; what was not sent is a miss."""
        self.apply(PrefetchEvent.STOP)

    @property
    def wanted(self) -> bool:
        """Whether its request is still there to use it."""
        return not self.left and self.live.state is RequestState.PREFETCHING

    @property
    def timed(self) -> bool:
        """Whether its deadline changes anything."""
        return self.wanted or self.issuing or bool(self.awaited)

    def indices_of(self, hits: tuple[bool, ...]) -> list[int]:
        """Which blocks of the prompt these hits are."""
        return [index for index, hit in zip(self.need.indices, hits, strict=True) if hit]

    def outcome(self, hits: tuple[bool, ...]) -> PrefetchOutcome:
        """How it ended, given the merged hits."""
        if self.why is not None:
            return self.why
        if all(hits):
            return PrefetchOutcome.HIT
        return PrefetchOutcome.PARTIAL if any(hits) else PrefetchOutcome.MISS
