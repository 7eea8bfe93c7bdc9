"""Prefetch jobs: from the holes of a request to "ready" (A1-A6). Workers report, the engine thread polls.

A request without holes, or with holes that nobody can fill, is ready at once. Otherwise it is PREFETCHING: its job
issues batches to all ranks, at most `MAX_BATCHES_IN_FLIGHT` at a time, and is over when nothing is in flight. Deadline,
cancel and a known miss stop *issuing*; they never abandon a batch in flight, because ranks still write into its slots.
What a stopped job never issued is given up at once: another job may fetch it.
At its deadline a request goes on without its job: a call to a dead master takes seconds, and nobody can hurry it.

A hash is fetched by one job at a time. Who needs it too waits for that job. A job only ever waits for older ones, so
waits form no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvtier_worker.core.hits import HitMatrix
from kvtier_worker.core.ids import JobId, Rank
from kvtier_worker.core.lifecycle import (
    PrefetchEvent,
    RequestEvent,
    RequestState,
)
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.messages import Prefetch, PrefetchDone
from kvtier_worker.engine.prefetch_job import PrefetchJob, PrefetchOutcome, PrefetchReport
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.errors import ProtocolError

MAX_BATCHES_IN_FLIGHT = 2
"""Per rank: one being read, one waiting in the worker, so that a round trip to the engine costs no idle time."""


@dataclass(slots=True)
class Admission:
    """All prefetch jobs of the engine.

    Args:
        blocks: leases and publishes.
        send: takes a message for every rank.
        job_ids: ids that no other job has.
        num_ranks: answers per batch.
        batch_size: logical blocks per batch.
        timeout_s: of one prefetch; None = never.
        on_ready: takes a request whose prefetch is over.
        on_quiesced: takes a cancelled request once nothing is in flight for it.
        on_end: takes the report of every job that read from the store.
    """

    blocks: TieredBlockManager
    send: Callable[[Prefetch], None]
    job_ids: Iterator[int]
    num_ranks: int
    batch_size: int
    timeout_s: float | None
    on_ready: Callable[[LiveRequest], None]
    on_quiesced: Callable[[LiveRequest], None]
    on_end: Callable[[PrefetchReport], None]
    jobs: dict[JobId, PrefetchJob] = field(default_factory=dict)
    _by_request: dict[LiveRequest, PrefetchJob] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        """Requests that are PREFETCHING."""
        return len(self._by_request)

    def start(self, live: LiveRequest, now: float, *, use_store: bool) -> None:
        """Probe the host; `on_ready` at once if there is nothing to wait for.

        Args:
            live: PREFETCHING, holds nothing.
            now: clock, seconds.
            use_store: False = pin what the host has and fetch nothing.
        """
        if not use_store:
            self.blocks.pin_resident(live)
            self._admit(live)
            return
        job_id = JobId(next(self.job_ids))
        need = self.blocks.plan_prefetch(live, job_id)
        if need is None or need.empty:
            self._admit(live)
            return
        num_items = len(need.plan.items)
        job = PrefetchJob(
            job_id=job_id,
            need=need,
            live=live,
            started=now,
            deadline=None if self.timeout_s is None else now + self.timeout_s,
            matrix=HitMatrix(self.num_ranks, num_items) if num_items else None,
            awaited=dict(need.awaited),
        )
        self.jobs[job_id] = self._by_request[live] = job
        for other in job.awaited:
            self.jobs[other].waiters.add(job_id)
        self._turn(job, now)

    def cancel(self, live: LiveRequest, now: float) -> None:
        """The request is STOPPING; its job ends once nothing is in flight, or goes on for whoever waits for it."""
        job = self._by_request.pop(live)
        self._leave_others(job, now)
        self._stop_if_unwanted(job)
        self._turn(job, now)

    def tick(self, now: float) -> None:
        """Stop what is past its deadline, and let its request go."""
        for job in list(self.jobs.values()):
            if job.deadline is not None and now >= job.deadline and job.timed:
                if job.why is None:
                    job.why = PrefetchOutcome.TIMEOUT
                if job.issuing:
                    self._stop(job)
                self._leave_others(job, now)
                self._turn(job, now)
                if job.wanted:
                    self._let_go(job)

    def next_deadline(self) -> float | None:
        """When `tick` is due; None = not by time."""
        deadlines = [job.deadline for job in self.jobs.values() if job.deadline is not None and job.timed]
        return min(deadlines, default=None)

    def on_done(self, message: PrefetchDone, now: float) -> None:
        """One rank ended one batch. An answer that nobody waits for is ignored.

        An answer that makes no sense fails its rank: all the job's blocks are misses.
        """
        job = self.jobs.get(JobId(message.job_id))
        ranks = job.in_flight.get(message.offset) if job is not None else None
        if job is None or ranks is None or message.rank not in ranks or job.matrix is None:
            return
        ranks.remove(message.rank)
        if not ranks:
            del job.in_flight[message.offset]
        expected = min(self.batch_size, len(job.need.plan.items) - message.offset)
        sound = len(message.hits) == expected
        if sound:
            try:
                job.matrix.record(Rank(message.rank), message.offset, message.hits)
            except ProtocolError:
                sound = False
        if not sound:
            job.matrix.mark_rank_failed(Rank(message.rank))
            job.why = PrefetchOutcome.ERROR
        if job.issuing and (not sound or 0 in message.hits):
            self._stop(job)
        self._turn(job, now)

    # private

    def _turn(self, job: PrefetchJob, now: float) -> None:
        """Send what may be sent; end the job, and then those that waited for it, if nothing is left to wait for."""
        stack = [job]
        while stack:
            job = stack.pop()
            self._issue(job)
            if not (job.issuing or job.in_flight or job.awaited) and job.job_id in self.jobs:
                stack += self._end(job, now)

    def _issue(self, job: PrefetchJob) -> None:
        items = job.need.plan.items
        while job.issuing and len(job.in_flight) < MAX_BATCHES_IN_FLIGHT:
            if job.issued == len(items):
                job.apply(PrefetchEvent.EXHAUSTED)
                break
            batch = items[job.issued : job.issued + self.batch_size]
            job.in_flight[job.issued] = set(range(self.num_ranks))
            self.send(Prefetch(job.job_id, job.issued, list(batch)))
            job.issued += len(batch)

    def _end(self, job: PrefetchJob, now: float) -> list[PrefetchJob]:
        """Publish or abandon, hand the request over; returns the jobs that waited for this one."""
        host = self.blocks.host
        assert host is not None
        del self.jobs[job.job_id]
        hits: tuple[bool, ...] = ()
        if job.matrix is not None:
            for rank in range(self.num_ranks):
                job.matrix.mark_rank_done(Rank(rank))
            hits = job.matrix.merged()
        found = hits[: len(job.need.indices)]
        waiters = [self.jobs[waiter] for waiter in sorted(job.waiters)]
        publish = job.wanted or job.left or bool(waiters)
        job.apply(PrefetchEvent.MERGED if publish else PrefetchEvent.DISCARDED)
        if publish:
            host.publish_fetched(job.need, found)
        if job.wanted:
            self.blocks.pin_fetched(job.live, job.indices_of(found))
        for waiter in waiters:
            whole = self.blocks.pin_fetched(waiter.live, waiter.awaited.pop(job.job_id))
            if not whole and waiter.issuing:
                self._stop(waiter)
        host.release_fetched(job.need)
        if hits:
            self.on_end(PrefetchReport(job.outcome(hits), len(hits), sum(hits), now - job.started))
        self._hand_over(job)
        return waiters

    def _hand_over(self, job: PrefetchJob) -> None:
        if job.wanted:
            del self._by_request[job.live]
            self._admit(job.live)
        elif not job.left and job.live.state is RequestState.STOPPING:
            self.blocks.release(job.live)
            job.live.apply(RequestEvent.QUIESCED)
            self.on_quiesced(job.live)

    def _let_go(self, job: PrefetchJob) -> None:
        """Its request goes on with what is whole by now; what is in flight is published when it is there."""
        job.left = True
        del self._by_request[job.live]
        if job.matrix is not None and self.blocks.host is not None:
            hits = job.matrix.agreed()[: len(job.need.indices)]
            self.blocks.host.publish_fetched(job.need, hits)
            self.blocks.pin_fetched(job.live, job.indices_of(hits))
        self._admit(job.live)

    def _admit(self, live: LiveRequest) -> None:
        self.blocks.mount(live)
        live.apply(RequestEvent.PREFETCH_ENDED)
        self.on_ready(live)

    def _leave_others(self, job: PrefetchJob, now: float) -> None:
        awaited, job.awaited = job.awaited, {}
        for other_id in awaited:
            other = self.jobs[other_id]
            other.waiters.discard(job.job_id)
            self._stop_if_unwanted(other)
            self._turn(other, now)

    def _stop_if_unwanted(self, job: PrefetchJob) -> None:
        if not job.wanted and not job.waiters and job.issuing:
            job.why = PrefetchOutcome.CANCELLED
            self._stop(job)

    def _stop(self, job: PrefetchJob) -> None:
        """Send nothing more of ``job``. Who waits for a block that was not sent computes it, when the job is over."""
        job.stop()
        if self.blocks.host is not None:
            job.need = self.blocks.host.drop_unsent(job.need, job.issued)
