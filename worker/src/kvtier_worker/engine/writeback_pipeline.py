"""Device -> host -> store in two overlapping stages: while one job is being put, the next one is being copied.

A device block never waits for the store: when more jobs are queued for the put than the store can take, the put of a
new one is left out. Its blocks are on the host all the same, which is what write-back promises.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_worker.core.plans import WritebackPlan
from kvtier_worker.engine.ports import Event
from kvtier_worker.engine.store_objects import PutResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Outcome of the D2H of one job; it worked iff ``count`` is the number of its items."""

    count: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Outcome of the put of one job and its duration."""

    put: PutResult
    seconds: float = 0.0


OnCopied = Callable[[CopyResult], None]
OnStored = Callable[[StoreResult], None]


@dataclass(frozen=True, slots=True)
class _Job:
    plan: WritebackPlan
    after: Event
    on_copied: OnCopied
    on_stored: OnStored


class WritebackPipeline:
    """Two threads and the queue between them. Every job gets ``on_copied`` and then ``on_stored``, exactly once each.

    Args:
        copy: copies one job, after an event; must not raise.
        put: puts one job; must not raise.
        max_queued_puts: jobs that may wait for the put.
    """

    def __init__(
        self,
        copy: Callable[[WritebackPlan, Event], CopyResult],
        put: Callable[[WritebackPlan], StoreResult],
        max_queued_puts: int,
    ) -> None:
        self._copy = copy
        self._put = put
        self._copies: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._puts: queue.Queue[_Job | None] = queue.Queue(max_queued_puts)
        self._lock = threading.Lock()
        self._pending = 0
        self._skipped = 0
        self._threads = [
            threading.Thread(target=self._run_copies, name="writeback-copy", daemon=True),
            threading.Thread(target=self._run_puts, name="writeback-put", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        """Jobs not answered to the end yet."""
        with self._lock:
            return self._pending

    @property
    def num_skipped_puts(self) -> int:
        """Jobs whose put was left out because too many were queued."""
        with self._lock:
            return self._skipped

    def submit(self, plan: WritebackPlan, after: Event, on_copied: OnCopied, on_stored: OnStored) -> None:
        """Queue one job; its copy starts after ``after``. Returns at once."""
        with self._lock:
            self._pending += 1
        self._copies.put(_Job(plan, after, on_copied, on_stored))

    def close(self) -> None:
        """Finish every job, then end both threads."""
        self._copies.put(None)
        for thread in self._threads:
            thread.join()

    def _run_copies(self) -> None:
        while (job := self._copies.get()) is not None:
            result = self._copy(job.plan, job.after)
            job.on_copied(result)
            if result.count == len(job.plan.items) and self._queue_put(job):
                continue
            self._finish(job, StoreResult(PutResult(num_failed=len(job.plan.items))))
        self._puts.put(None)

    def _queue_put(self, job: _Job) -> bool:
        try:
            self._puts.put_nowait(job)
        except queue.Full:
            with self._lock:
                self._skipped += 1
            log.warning("put left out job=%d reason='too many are queued'", job.plan.job_id)
            return False
        return True

    def _run_puts(self) -> None:
        while (job := self._puts.get()) is not None:
            self._finish(job, self._put(job.plan))

    def _finish(self, job: _Job, result: StoreResult) -> None:
        with self._lock:
            self._pending -= 1
        job.on_stored(result)
