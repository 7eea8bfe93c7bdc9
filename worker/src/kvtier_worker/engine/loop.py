"""The engine thread: poll completions, admit, schedule, dispatch, collect, publish and write back.

One thread owns every block and every request. It waits in one place, `WorkerGroup.poll`, and is woken by a worker's
message, by `wake` after something entered the inbox, or by a deadline. One step is in flight at a time; while it runs
the loop goes on to take requests and to drive prefetches, so they overlap with it.

Order inside a turn matters: the results of a step are committed and its write-backs sent before the next step is
planned, so that the planner sees every block that can be shared or evicted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BatchId, RequestId
from kvtier_worker.core.lifecycle import RequestEvent, RequestState
from kvtier_worker.engine.admin import AdminCalls
from kvtier_worker.engine.admission import Admission
from kvtier_worker.engine.front import EngineFront, engine_info
from kvtier_worker.engine.frontend import EngineDraining, FinishReason, PoolReport, RequestOutput
from kvtier_worker.engine.host_tier import WritebackEntry
from kvtier_worker.engine.integrity import check_pools
from kvtier_worker.engine.messages import (
    ForwardDone,
    PrefetchDone,
    RestoreRegistered,
    StatsRequest,
    StoreProbed,
    WorkerFailed,
    WorkerReady,
    WorkerStats,
    WritebackCopied,
    WritebackStored,
)
from kvtier_worker.engine.metrics import EngineMetrics
from kvtier_worker.engine.ports import WorkerGroup
from kvtier_worker.engine.progress import Progress
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.engine.restore_gate import RestoreGate
from kvtier_worker.engine.scheduler import Scheduler, StepLimits
from kvtier_worker.engine.step import StepInFlight, forward_message, restore_message
from kvtier_worker.engine.store_watch import StoreWatch
from kvtier_worker.engine.tiers import build_tiers, gauges, pools
from kvtier_worker.engine.writeback import WritebackJobs
from kvtier_worker.errors import WorkerDied

IDLE_S: Final = 5.0
"""Longest wait in `poll`: often enough to show that the thread lives."""

_log = logging.getLogger(__name__)


class EngineLoop(EngineFront):
    """Implements `EngineClient`; `run` is the engine thread.

    Args:
        settings: validated.
        workers: started; every rank is ready.
        clock: seconds, monotonic.
    """

    def __init__(
        self, settings: WorkerSettings, workers: WorkerGroup, clock: Callable[[], float] = time.monotonic
    ) -> None:
        info = engine_info(settings, workers)
        super().__init__(settings, info, workers.wake, clock)
        self._workers = workers
        self._stopping = False
        self._live: dict[RequestId, LiveRequest] = {}
        self._step: StepInFlight | None = None
        self._batch_ids = itertools.count(1)
        self._job_ids = itertools.count(1)
        self.metrics = EngineMetrics()
        self.blocks = build_tiers(settings, info.num_device_blocks, info.num_host_slots)
        host = self.blocks.host
        self._store = StoreWatch(settings.enable_kvcache_store and host is not None)
        self._writebacks = None if host is None else WritebackJobs(self.blocks.device, host, info.tp_size)
        self._gate = RestoreGate(
            enabled=settings.enable_restore_cost_gate,
            object_bytes=max(rank.object_bytes for rank in workers.ready),
            block_size=settings.block_size,
            num_ranges=max(1, settings.layers_wise_copy_batchs),
        )
        self._scheduler = Scheduler(
            limits=StepLimits.of(settings),
            blocks=self.blocks,
            metrics=self.metrics,
            find=self._live.get,
            write_back=self._write_back,
            gate=self._gate.trim,
            clock=clock,
        )
        self._progress = Progress(self.blocks, self._scheduler, self.metrics, self._write_back, self._forget, clock)
        self._admission = Admission(
            blocks=self.blocks,
            send=workers.send,
            job_ids=self._job_ids,
            num_ranks=info.tp_size,
            batch_size=max(1, settings.prefetch_batch_size),
            timeout_s=settings.prefetch_timeout / 1000 or None,
            on_ready=self._scheduler.waiting.add,
            on_quiesced=self._on_quiesced,
            on_end=self.metrics.prefetch_ended,
        )
        self._admin = AdminCalls(
            blocks=self.blocks,
            writebacks=self._writebacks,
            block_size=settings.block_size,
            num_ranks=info.tp_size,
            store=settings.enable_kvcache_store,
            send=workers.send,
            job_ids=self._job_ids,
            check=self.check,
            idle=lambda: self.idle,
            cancel_all=self._cancel_all,
            drain_timeout_s=settings.drain_timeout / 1000,
        )
        block_bytes = sum(rank.object_bytes for rank in workers.ready)
        self.metrics.watch(
            pools(self.blocks), lambda: gauges(self.blocks, self._scheduler, self._admission, block_bytes)
        )
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ForwardDone: self._on_forward_done,
            RestoreRegistered: self._on_registered,
            PrefetchDone: self._on_prefetch_done,
            WritebackCopied: self._on_copied,
            WritebackStored: self._on_stored,
            StoreProbed: self._admin.on_probed,
            WorkerStats: self._on_stats,
            WorkerFailed: self._on_worker_failed,
            WorkerReady: _ignore,
        }

    # the thread

    def run(self) -> str:
        """Turn until `stop` or until the engine cannot go on.

        Returns:
            Why it died; empty after `stop`. Every live request has its last output, every admin call its answer.
        """
        self._wake()  # the first turn makes the engine ready: it waits for nothing
        try:
            while not self._stopping:
                self.turn()
        except WorkerDied as error:
            self._end(str(error), fatal=True)
        except Exception as error:  # noqa: BLE001 - the top of this thread: a bug ends the process, it hangs no client
            _log.exception("engine thread failed")
            self._end(f"engine thread failed: {error!r}", fatal=True)
        else:
            self._end("the engine stopped", fatal=False)
        return self._fatal

    def stop(self) -> None:
        """Make `run` return after its turn; any thread. Drain first if clients matter."""
        self._post(self._on_stop)

    def turn(self) -> None:
        """Wait for something to do, and do it."""
        for message in self._workers.poll(self._patience()):
            self._handlers[type(message)](message)
        self._empty_inbox()
        now = self._last_turn = self._clock()
        self._admission.tick(now)
        self._collect(now)
        self._check_answers(now)
        self._flush()
        self._dispatch(now)
        self._admin.turn(now)
        if self._step is not None and self._store.should_ask(now):
            self._workers.send(StatsRequest(next(self._job_ids)))

    @property
    def idle(self) -> bool:
        """Whether no request is live and no job or step in flight."""
        jobs = self._writebacks is not None and not self._writebacks.idle
        return not (self._live or self._step or jobs or self._admission.jobs)

    def check(self) -> tuple[PoolReport, ...]:
        """Run the pools' checks against who holds what; engine thread only."""
        return check_pools(self.blocks, self._live.values(), self._writebacks, self._admission)

    def _patience(self) -> float:
        due = [when for when in (self._admission.next_deadline(), self._admin.next_deadline()) if when is not None]
        return max(0.0, min(IDLE_S, min(due) - self._clock())) if due else IDLE_S

    def _collect(self, now: float) -> None:
        step = self._step
        if step is None or not step.complete:
            return
        self._step = None
        error = step.error()
        if error:
            _log.warning("step failed", extra={"batch": step.plan.batch_id, "error": error})
            self._progress.fail(step, error)
        else:
            self._progress.commit(step, now)
            self._gate.on_step(step.plan, list(step.done.values()))
        self.metrics.step_ended(step.done, now - step.started)

    def _check_answers(self, now: float) -> None:
        """A worker that lives and never answers is as good as dead: a restart beats clients that wait for ever."""
        if self._step is not None and (reason := self._step.overdue(now)):
            raise WorkerDied(reason)

    def _dispatch(self, now: float) -> None:
        if self._step is not None:
            return
        plan = self._scheduler.schedule(BatchId(next(self._batch_ids)))
        self._num_running = len(self._scheduler.running)
        self._flush()
        if plan is None:
            self._check_progress()
            return
        self._step = StepInFlight(plan, self._info.tp_size, now)
        restore = restore_message(plan)
        if restore is not None:
            self._workers.send(restore)
        self._workers.send(forward_message(plan))

    def _check_progress(self) -> None:
        """Nothing can be computed. That is fine if somebody will give blocks back; else it is a bug: fail, not hang."""
        stuck = self._scheduler.running or len(self._scheduler.waiting)
        working = self._admission.jobs or (self._writebacks is not None and not self._writebacks.idle)
        if working or not stuck:
            return
        for live in list(self._live.values()):
            if live.state in (RequestState.RUNNING, RequestState.WAITING):
                _log.error("request cannot be scheduled", extra={"request": live.request_id})
                self.blocks.release(live)
                self._progress.end_with_error(live, "the engine cannot make room for this request")

    def _flush(self) -> None:
        if self._writebacks is not None:
            for message in self._writebacks.flush(self._job_ids):
                self._workers.send(message)

    def _write_back(self, entries: list[WritebackEntry]) -> None:
        if self._writebacks is not None:
            self._writebacks.add(entries)

    # requests

    def _on_submit(self, live: LiveRequest) -> None:
        error = self._ended
        if live.request_id in self._live:
            error = f"a request with id {live.request_id} is live already"
        if error:
            live.apply(RequestEvent.FAILED)
            self._progress.tell(live, RequestOutput(live.request_id, finish_reason=FinishReason.ERROR, error=error))
            self._request_gone()
            return
        self._live[live.request_id] = live
        now = self._clock()
        use_store = live.request.leader is None and self._store.usable(now)
        self._admission.start(live, now, use_store=use_store)

    def _on_cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        live = self._live.get(request_id)
        if live is None or live.state is RequestState.STOPPING:
            return
        prefetching = live.state is RequestState.PREFETCHING
        self._progress.cancel(live, None if self._step is None else self._step.plan, reason)
        if prefetching:
            self._admission.cancel(live, self._clock())

    def _on_quiesced(self, live: LiveRequest) -> None:
        self._scheduler.leave(live)
        self._forget(live)

    def _cancel_all(self) -> None:
        for request_id in list(self._live):
            self._on_cancel(request_id, FinishReason.CANCELLED)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request_id]
        self._request_gone()

    # messages

    def _on_forward_done(self, message: ForwardDone) -> None:
        if self._step is not None:
            self._step.on_done(message)

    def _on_registered(self, message: RestoreRegistered) -> None:
        if self._step is not None:
            self._step.on_registered(message)

    def _on_prefetch_done(self, message: PrefetchDone) -> None:
        self.metrics.prefetch_done(message)
        self._store.on_prefetch(message)
        self._admission.on_done(message, self._clock())

    def _on_copied(self, message: WritebackCopied) -> None:
        self.metrics.copied(message)
        if self._writebacks is not None:
            self._writebacks.on_copied(message)

    def _on_stored(self, message: WritebackStored) -> None:
        self.metrics.stored(message)
        if self._writebacks is not None:
            self._writebacks.on_stored(message)

    def _on_stats(self, message: WorkerStats) -> None:
        self.metrics.stats(message)
        self._store.on_stats(message, self._clock())
        self._gate.on_stats(message)
        self._admin.on_stats(message)

    def _on_worker_failed(self, message: WorkerFailed) -> None:
        msg = f"worker {message.rank} failed: {message.error}"
        raise WorkerDied(msg)

    # the end

    def _on_stop(self) -> None:
        self._stopping = True

    def _end(self, reason: str, *, fatal: bool) -> None:
        self._close(reason, fatal=fatal)
        for live in list(self._live.values()):
            if live.state is not RequestState.STOPPING:
                output = RequestOutput(live.request_id, (), (), FinishReason.ERROR, live.cached, reason)
                self._progress.tell(live, output)
            live.apply(RequestEvent.FAILED)
            self._forget(live)
        self._admin.fail(EngineDraining(reason))
        self._empty_inbox()


def _ignore(message: WorkerReady) -> None:
    """A worker said that it is ready, which the engine knew before it started."""
