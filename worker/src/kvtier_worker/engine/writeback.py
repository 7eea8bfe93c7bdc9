"""Write-back jobs: device -> host -> store, from collected blocks to the last rank's answer (W1, W2).

A job leases both ends of every copy. The device end is released when every rank reported its copy, well or badly; the
host end when every rank ended its put. Host publication needs the expected count from every rank, all or nothing a
job; what the store made of it never matters here. Called by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvtier_worker.core.ids import JobId
from kvtier_worker.core.lifecycle import WRITEBACK_TABLE, WritebackEvent, WritebackState, advance
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.host_tier import HostTier, WritebackEntry
from kvtier_worker.engine.messages import Writeback, WritebackCopied, WritebackStored

MAX_BLOCKS_PER_JOB = 16
"""Publication is all or nothing a job, and a job holds its device blocks until its last copy: keep jobs short."""


@dataclass(slots=True)
class WritebackJob:
    """One job in flight. ``copying`` and ``storing`` are the ranks that have not answered yet."""

    job_id: JobId
    entries: tuple[WritebackEntry, ...]
    copying: set[int]
    storing: set[int]
    state: WritebackState = WritebackState.QUEUED
    whole: bool = True

    def apply(self, event: WritebackEvent) -> None:
        """Move to the state that the table names."""
        self.state = advance(WRITEBACK_TABLE, self.state, event)


@dataclass(slots=True)
class WritebackJobs:
    """All write-back jobs of the engine.

    Args:
        device: pool of the sources.
        host: tier of the destinations.
        num_ranks: answers to wait for.
    """

    device: BlockPool
    host: HostTier
    num_ranks: int
    jobs: dict[JobId, WritebackJob] = field(default_factory=dict)
    num_failed_blocks: int = 0
    _queue: list[WritebackEntry] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not (self._queue or self.jobs)

    def add(self, entries: Sequence[WritebackEntry]) -> None:
        """Take over the leases of ``entries``; they travel with the next `flush`."""
        self._queue += entries

    def queued(self) -> Sequence[WritebackEntry]:
        """What waits for the next `flush`."""
        return self._queue

    def flush(self, job_ids: Iterator[int]) -> list[Writeback]:
        """Messages for everything queued; each reads device blocks that the Forwards sent before it complete."""
        messages: list[Writeback] = []
        ranks = range(self.num_ranks)
        for start in range(0, len(self._queue), MAX_BLOCKS_PER_JOB):
            entries = tuple(self._queue[start : start + MAX_BLOCKS_PER_JOB])
            job = WritebackJob(JobId(next(job_ids)), entries, set(ranks), set(ranks))
            job.apply(WritebackEvent.SENT)
            self.jobs[job.job_id] = job
            messages.append(Writeback(job.job_id, [entry.item for entry in entries]))
        self._queue.clear()
        return messages

    def on_copied(self, message: WritebackCopied) -> None:
        """One rank ended its device -> host copies. A second answer of a rank, or of no job of ours, is ignored."""
        job = self.jobs.get(JobId(message.job_id))
        if job is None or message.rank not in job.copying:
            return
        job.copying.remove(message.rank)
        job.whole = job.whole and not message.error and message.count == len(job.entries)
        if job.copying:
            return
        job.apply(WritebackEvent.COPIED if job.whole else WritebackEvent.COPY_FAILED)
        if not job.whole:
            self.num_failed_blocks += len(job.entries)
        self.host.end_copy(job.entries, ok=job.whole)
        self.device.release([entry.item.device_block for entry in job.entries])
        self._end_if_stored(job)

    def on_stored(self, message: WritebackStored) -> None:
        """One rank no longer reads the host slots of a job."""
        job = self.jobs.get(JobId(message.job_id))
        if job is None:
            return
        job.storing.discard(message.rank)
        self._end_if_stored(job)

    def _end_if_stored(self, job: WritebackJob) -> None:
        if job.copying or job.storing:
            return
        job.apply(WritebackEvent.STORED)
        self.host.pool.release([entry.item.host_slot for entry in job.entries])
        del self.jobs[job.job_id]
