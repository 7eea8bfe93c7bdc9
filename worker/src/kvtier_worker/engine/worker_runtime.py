"""The message loop of one worker process: who does which request, and that each is answered exactly once.

    thread            does
    link (IO)         receives and routes; never works
    main = compute    RegisterRestore, Forward, StatsRequest in order of arrival; queues Writeback behind its Forward
    prefetch-0…N      Prefetch, StoreProbe
    writeback-*       the two stages of write-back (in `HierarchyKVCacheTransfer`)

Answers are sent by whoever has them. A request that fails is answered with its error; the process ends only on
Shutdown, when the engine is gone, or when the device or the other ranks are beyond use.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier_worker.core.ids import BatchId, BlockHash, JobId
from kvtier_worker.core.plans import RestorePlan, WritebackPlan
from kvtier_worker.engine.messages import (
    Forward,
    ForwardDone,
    FromWorker,
    Prefetch,
    PrefetchDone,
    RegisterRestore,
    RestoreRegistered,
    Shutdown,
    StatsRequest,
    StoreProbe,
    StoreProbed,
    TokenOutput,
    ToWorker,
    WorkerFailed,
    WorkerStats,
    Writeback,
    WritebackCopied,
    WritebackStored,
)
from kvtier_worker.engine.ports import ModelRunner
from kvtier_worker.engine.store_objects import PrefetchResult, ProbeResult
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer
from kvtier_worker.engine.writeback_pipeline import CopyResult, StoreResult
from kvtier_worker.errors import KVTierError

log = logging.getLogger(__name__)


class WorkerLink(Protocol):
    """The worker's end of the connection to the engine process."""

    def receive(self) -> ToWorker | None:
        """The next request; None = the engine is gone or `close` was called. One thread only.

        Raises:
            ProtocolError: something came that is no request.
        """

    def send(self, message: FromWorker) -> None:
        """Send an answer. Any thread; never blocks. After the engine is gone it goes nowhere."""

    def close(self) -> None:
        """Let a blocked `receive` return None. Any thread, idempotent."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What the loop needs to know of its process.

    Attributes:
        rank: of this worker.
        num_prefetch_threads: prefetches and probes that run at once; two let the check of one batch overlap the
            reading of the next.
        is_fatal: whether an exception of the model means that nothing will work any more.
        resident_bytes: memory of this process.
        tidy: called by the compute thread after each answered forward, with its number of tokens.
    """

    rank: int
    is_fatal: Callable[[Exception], bool]
    resident_bytes: Callable[[], int]
    num_prefetch_threads: int = 4
    tidy: Callable[[int], None] = lambda _num_tokens: None


_ComputeWork = RegisterRestore | Forward | Writeback | StatsRequest
_StoreWork = Prefetch | StoreProbe


class WorkerRuntime:
    """Serves one engine until it says Shutdown or disappears.

    Args:
        options: see `RuntimeOptions`.
        link: to the engine.
        model: this rank's model; used by the thread that calls `run`.
        transfer: finalised; shut down by `run` at its end.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: RuntimeOptions,
        *,
        link: WorkerLink,
        model: ModelRunner,
        transfer: HierarchyKVCacheTransfer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._rank = options.rank
        self._link = link
        self._model = model
        self._transfer = transfer
        self._clock = clock
        self._compute: queue.SimpleQueue[_ComputeWork | None] = queue.SimpleQueue()
        self._store: queue.SimpleQueue[_StoreWork | None] = queue.SimpleQueue()
        self._failure = ""

    def run(self) -> str:
        """Serve; returns why it cannot go on, or nothing when it was told to stop. Call from the compute thread."""
        threads = [threading.Thread(target=self._route, name="link")]
        threads += [
            threading.Thread(target=self._serve_store, name=f"prefetch-{index}")
            for index in range(self._options.num_prefetch_threads)
        ]
        for thread in threads:
            thread.start()
        while (work := self._compute.get()) is not None:
            self._serve_compute(work)
        for _ in range(self._options.num_prefetch_threads):
            self._store.put(None)
        self._link.close()
        for thread in threads:
            thread.join()
        self._transfer.shutdown()
        if self._failure:
            self._link.send(WorkerFailed(self._rank, self._failure))
        return self._failure

    def _route(self) -> None:
        """Sort requests into the two lanes until there will be no more."""
        try:
            while (message := self._link.receive()) is not None and not isinstance(message, Shutdown):
                if isinstance(message, Prefetch | StoreProbe):
                    self._store.put(message)
                else:
                    self._compute.put(message)
        except Exception as error:  # noqa: BLE001 - top of this thread: without it the others would wait for ever
            self._fail(error)
        self._compute.put(None)

    # compute lane

    def _serve_compute(self, work: _ComputeWork) -> None:
        match work:
            case Forward():
                self._link.send(self._forward(work))
                self._options.tidy(sum(len(sequence.token_ids) for sequence in work.sequences))
            case RegisterRestore():
                self._link.send(self._register(work))
            case Writeback():
                self._writeback(work)
            case StatsRequest():
                self._link.send(self._stats(work))

    def _register(self, message: RegisterRestore) -> RestoreRegistered:
        plan = RestorePlan(BatchId(message.batch_id), tuple(message.items))
        try:
            count = self._transfer.restore(plan)
        except Exception as error:  # noqa: BLE001 - top loop: every request is answered
            return RestoreRegistered(self._rank, message.batch_id, 0, self._describe(error))
        return RestoreRegistered(self._rank, message.batch_id, count)

    def _forward(self, message: Forward) -> ForwardDone:
        if self._failure:  # out of step with the other ranks: computing could wait for them for ever
            return ForwardDone(self._rank, message.batch_id, [], 0.0, 0.0, self._failure)
        started = self._clock()
        outputs: Sequence[TokenOutput] = ()
        stall_s, error_text = 0.0, ""
        gate = None
        try:
            gate = self._transfer.take(BatchId(message.batch_id), expected=message.has_restore)
            outputs = self._model.forward(message.sequences, gate)
            if gate is not None:
                gate.finish()
        except Exception as error:  # noqa: BLE001 - top loop: every request is answered
            outputs, error_text = (), self._describe(error)
            blameless = gate is not None and gate.failed  # computed on unfilled blocks to stay in step with the ranks
            if not blameless and not isinstance(error, KVTierError) and self._options.is_fatal(error):
                self._fail(error)
            if gate is not None:
                gate.abandon(error_text)
        if gate is not None:
            stall_s = gate.stall_s
        elapsed = self._clock() - started
        shown = list(outputs) if self._rank == 0 else []
        return ForwardDone(self._rank, message.batch_id, shown, max(elapsed - stall_s, 0.0), stall_s, error_text)

    def _writeback(self, message: Writeback) -> None:
        plan = WritebackPlan(JobId(message.job_id), tuple(message.items))

        def copied(result: CopyResult) -> None:
            self._link.send(
                WritebackCopied(
                    self._rank, message.job_id, result.count, result.num_bytes, result.seconds, result.error
                )
            )

        def stored(result: StoreResult) -> None:
            put = result.put
            counts = (put.num_stored, put.num_existing, put.num_failed, put.num_bytes)
            self._link.send(WritebackStored(self._rank, message.job_id, *counts, result.seconds))

        try:
            self._transfer.writeback(plan, copied, stored)
        except Exception as error:  # noqa: BLE001 - top loop: every request is answered
            self._link.send(WritebackCopied(self._rank, message.job_id, 0, 0, 0.0, self._describe(error)))
            self._link.send(WritebackStored(self._rank, message.job_id, 0, 0, len(message.items), 0, 0.0))

    def _stats(self, message: StatsRequest) -> WorkerStats:
        stats = self._transfer.stats()
        copies = stats.copies
        return WorkerStats(
            self._rank,
            message.job_id,
            resident_bytes=self._options.resident_bytes(),
            restore_bytes=copies.restore_bytes,
            restore_s=copies.restore_s,
            writeback_bytes=copies.writeback_bytes,
            writeback_s=copies.writeback_s,
            store_state=stats.store_state,
            store_errors=dict(stats.store_errors),
            faults=self._transfer.check_integrity(),
        )

    # store lane

    def _serve_store(self) -> None:
        while (work := self._store.get()) is not None:
            self._link.send(self._prefetch(work) if isinstance(work, Prefetch) else self._probe(work))

    def _prefetch(self, message: Prefetch) -> PrefetchDone:
        started = self._clock()
        try:
            result = self._transfer.prefetch(message.items)
        except Exception as error:  # noqa: BLE001 - top loop: every request is answered, here with misses
            self._describe(error)
            result = PrefetchResult(bytes(len(message.items)), num_faults=len(message.items))
        return PrefetchDone(
            self._rank,
            message.job_id,
            message.offset,
            result.hits,
            result.num_bytes,
            self._clock() - started,
            result.num_faults,
            result.num_corrupt,
        )

    def _probe(self, message: StoreProbe) -> StoreProbed:
        try:
            result = self._transfer.probe([BlockHash(block_hash) for block_hash in message.block_hashes])
        except Exception as error:  # noqa: BLE001 - top loop: every request is answered
            self._describe(error)
            result = ProbeResult(bytes(len(message.block_hashes)), available=False)
        return StoreProbed(self._rank, message.job_id, result.exists, result.available)

    # failures

    def _describe(self, error: Exception) -> str:
        if isinstance(error, KVTierError):
            log.warning("request failed rank=%d error=%r", self._rank, str(error))
            return str(error)
        log.error("request failed rank=%d", self._rank, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _fail(self, error: Exception) -> None:
        """End the loop after what is queued has been answered."""
        self._failure = self._failure or f"{type(error).__name__}: {error}"
        self._link.close()
