"""What a step changed: tokens appended and delivered, blocks published, sequences ended or put back to waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvtier_worker.core.lifecycle import RequestEvent, RequestState
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.frontend import FinishReason, RequestOutput, TokenLogprob
from kvtier_worker.engine.host_tier import WritebackEntry
from kvtier_worker.engine.messages import TokenOutput
from kvtier_worker.engine.metrics import EngineMetrics
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.engine.scheduler import Scheduler, StepPlan
from kvtier_worker.engine.step import StepInFlight

_log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 2
"""Steps without restores that may fail under a request, without a good one between, before it ends with an error."""


@dataclass(slots=True)
class Progress:
    """Carries the outcome of a step over to its requests. Called by the engine thread, with no step in flight.

    Args:
        blocks: the tiers.
        scheduler: queues of the requests.
        metrics: counters.
        write_back: takes blocks to write back.
        forget: called with every request after its last output and the last use of its blocks.
        clock: for the latencies it reports.
    """

    blocks: TieredBlockManager
    scheduler: Scheduler
    metrics: EngineMetrics
    write_back: Callable[[list[WritebackEntry]], None]
    forget: Callable[[LiveRequest], None]
    clock: Callable[[], float]

    def commit(self, step: StepInFlight, now: float) -> None:
        """The step succeeded on every rank."""
        outputs = step.outputs()
        block_size = self.blocks.block_size
        for live, start, count, sample in step.plan.sequences:
            end = live.num_computed = start + count
            live.num_failures = 0
            if not live.counted:
                self._count_prompt(live)
            if end // block_size > live.held.num_settled:
                started = self.clock()
                self.write_back(self.blocks.settle(live))
                self.metrics.insert_s.inc(self.clock() - started)
                self.scheduler.progressed(live)
            if live.state is RequestState.STOPPING:
                self._quiesce(live)
            elif sample:
                self._deliver(live, outputs[live.request.request_id], now)

    def fail(self, step: StepInFlight, error: str) -> None:
        """The step failed on some rank: everything it was to fill is taken back, its requests wait again or fail (R3).

        Every request that shares a block pending on this step is in this step, so none is left behind. A step with
        restores is held against none of its requests, for most of them restored nothing: they all compute from now on
        what the host has. Then a restore that always fails costs one step, whoever shares it or is beside it.
        """
        self.metrics.failed_steps.inc()
        restored = bool(step.plan.restores)
        for live, *_ in step.plan.sequences:
            self.blocks.abort_pending(live)
        for live, *_ in step.plan.sequences:
            live.num_failures += not restored
            live.shun_host = live.shun_host or restored
            if live.state is RequestState.STOPPING:
                self._quiesce(live)
                continue
            self.blocks.release(live)
            if live.num_failures > MAX_FAILED_STEPS:
                self.end_with_error(live, f"the step failed {live.num_failures} times: {error}")
                continue
            live.apply(RequestEvent.RESTORE_ABORTED)
            self.scheduler.leave(live)
            self.scheduler.waiting.add(live)

    def cancel(self, live: LiveRequest, plan: StepPlan | None, reason: FinishReason) -> None:
        """End a request for its client now, as ``reason``; its blocks follow when ``plan``, the step in flight, ends.

        A PREFETCHING request is STOPPING afterwards; the caller stops its job.
        """
        was = live.state
        live.apply(RequestEvent.CANCELLED)
        self.tell(live, RequestOutput(live.request_id, (), (), reason, live.cached))
        self.metrics.requests.labels(reason).inc()
        if was is RequestState.WAITING:
            self.scheduler.leave(live)
            self.blocks.release(live)
            self.forget(live)
        elif was is RequestState.RUNNING and not (plan and any(entry.live is live for entry in plan.sequences)):
            self._quiesce(live)

    def end_with_error(self, live: LiveRequest, error: str) -> None:
        """Tell the client, and forget a request that holds nothing and that no step touches."""
        live.apply(RequestEvent.FAILED)
        self.scheduler.leave(live)
        self.tell(live, RequestOutput(live.request_id, (), (), FinishReason.ERROR, live.cached, error))
        self.metrics.requests.labels(FinishReason.ERROR).inc()
        self.forget(live)

    def tell(self, live: LiveRequest, output: RequestOutput) -> bool:
        """Hand ``output`` to the client; False = its sink raised, which concerns nobody but this client."""
        try:
            live.sink(output)
        except Exception:  # noqa: BLE001 - foreign code in the engine's thread
            _log.exception("a client cannot take its outputs", extra={"request": live.request_id})
            self.metrics.failed_sinks.inc()
            return False
        return True

    # private

    def _deliver(self, live: LiveRequest, output: TokenOutput, now: float) -> None:
        token_id, tokens = output.token_id, live.tokens
        tokens.append(token_id)
        self.metrics.generated_tokens += 1
        elapsed_ms = (now - live.last_token_at) * 1000
        live.last_token_at = now
        if len(tokens) == live.prompt_len + 1:
            self.metrics.ttft_ms.observe(elapsed_ms)
            self.scheduler.progressed(live)
        else:
            self.metrics.itl_ms.observe(elapsed_ms)
        reason = None
        if token_id in live.stop_ids:
            reason = FinishReason.STOP
        elif len(tokens) >= live.max_tokens_len:
            reason = FinishReason.LENGTH
        logprobs: tuple[TokenLogprob, ...] = ()
        if live.sampling.logprobs is not None:
            logprobs = (TokenLogprob(token_id, output.logprob, tuple(output.top)),)
        if reason is not None:
            self._finish(live, reason)
        told = self.tell(live, RequestOutput(live.request.request_id, (token_id,), logprobs, reason, live.cached))
        if reason is not None:
            self.forget(live)
        elif not told:
            live.apply(RequestEvent.CANCELLED)
            self.metrics.requests.labels(FinishReason.CANCELLED).inc()
            self._quiesce(live)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> None:
        self.write_back(self.blocks.retire(live))
        live.apply(RequestEvent.FINISHED)
        self.scheduler.leave(live)
        self.metrics.requests.labels(reason).inc()

    def _quiesce(self, live: LiveRequest) -> None:
        self.write_back(self.blocks.retire(live))
        live.apply(RequestEvent.QUIESCED)
        self.scheduler.leave(live)
        self.forget(live)

    def _count_prompt(self, live: LiveRequest) -> None:
        live.counted = True
        live.cached = self.blocks.cached_tokens(live)
        size = self.blocks.block_size
        self.metrics.prompt_counted(live.prompt_len, live.prompt_len // size, size, live.cached)
