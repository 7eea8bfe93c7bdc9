"""A scripted engine behind `EngineClient`: a thread that emits what a script says, one step after the other.

It models just enough for the front's tests: token budgets, end-of-sequence ids, cancelling, a cache that remembers
full blocks, refusals and failures on demand. It computes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self, TypeVar

from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.engine.frontend import (
    EngineBusy,
    EngineDraining,
    EngineHealth,
    EngineInfo,
    EngineRequest,
    FinishReason,
    OutputSink,
    PoolReport,
    ProbeReport,
    PromptTooLong,
    RequestOutput,
    TokenLogprob,
)

Script = Callable[[EngineRequest], Iterator[int | None]]
"""The tokens that answer a request, one a step, None = none in this step; may be endless, may raise ScriptedFailure."""

Value = TypeVar("Value")

DEFAULT_INFO = EngineInfo(
    model_id="scripted",
    max_model_len=256,
    vocab_size=512,
    block_size=16,
    num_device_blocks=64,
    num_host_slots=0,
    tp_size=1,
    eos_token_ids=(0,),
)


class ScriptedFailure(Exception):
    """Raised by a script to fail its sequence, as a lost worker would."""


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    sink: OutputSink
    tokens: Iterator[int | None]
    cached: Mapping[Tier, int]
    emitted: int = 0


@dataclass(slots=True)
class _State:
    running: dict[RequestId, _Running] = field(default_factory=dict)
    cached_blocks: set[tuple[int, ...]] = field(default_factory=set)
    cancelled: dict[RequestId, FinishReason] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    drains: list[Future[None]] = field(default_factory=list)
    draining: bool = False
    closed: bool = False


class ScriptedEngine:
    """Use as a context manager; leaving it ends the thread.

    Args:
        script: what to answer.
        info: facts it reports.
        limit: sequences at once; more are refused as busy.
        step_s: pause between two steps, so that a client can leave in between.
    """

    def __init__(
        self, script: Script, info: EngineInfo = DEFAULT_INFO, *, limit: int = 1000, step_s: float = 0
    ) -> None:
        self._script = script
        self._info = info
        self._limit = limit
        self._step_s = step_s
        self._state = _State()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="scripted-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def requests(self) -> tuple[EngineRequest, ...]:
        """Every request ever submitted."""
        with self._changed:
            return tuple(self._state.requests)

    @property
    def cancelled(self) -> Mapping[RequestId, FinishReason]:
        """Live requests that were cancelled, with the reason given."""
        with self._changed:
            return dict(self._state.cancelled)

    def wait_cancelled(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` requests were cancelled and none runs."""
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._state.cancelled) >= count and not self._state.running, timeout_s
            )

    @property
    def info(self) -> EngineInfo:
        """Facts given at the start."""
        return self._info

    def health(self) -> EngineHealth:
        """Ready until drained."""
        with self._changed:
            draining = self._state.draining
        return EngineHealth(alive=True, ready=not draining, reason="draining" if draining else "")

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Take a request, or refuse it as the real engine does."""
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        with self._changed:
            state = self._state
            if state.draining:
                raise EngineDraining("the engine is draining")
            if total > self._info.max_model_len:
                raise PromptTooLong(f"{total} tokens; at most {self._info.max_model_len}")
            if len(state.running) >= self._limit:
                raise EngineBusy(f"{len(state.running)} sequences are running; at most {self._limit}")
            state.requests.append(request)
            cached = {Tier.DEVICE: self._hit_blocks(request.prompt_token_ids) * self._info.block_size}
            state.running[request.request_id] = _Running(request, sink, self._script(request), cached)
            self._changed.notify_all()

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early."""
        with self._changed:
            running = self._state.running.pop(request_id, None)
            if running is not None:
                self._state.cancelled[request_id] = reason
            self._settle()
        if running is not None:
            running.sink(RequestOutput(request_id, finish_reason=reason))

    def drop_caches(self, tiers: frozenset[Tier]) -> Future[Mapping[Tier, int]]:
        """Forget the remembered blocks."""
        with self._changed:
            dropped = len(self._state.cached_blocks) if Tier.DEVICE in tiers else 0
            if Tier.DEVICE in tiers:
                self._state.cached_blocks.clear()
        return _done({tier: dropped if tier is Tier.DEVICE else 0 for tier in tiers})

    def probe(self, prompt_token_ids: tuple[int, ...], extra_key: bytes = b"") -> Future[ProbeReport]:
        """What is remembered of a prompt; the salt is not modelled."""
        del extra_key
        with self._changed:
            hits = self._hit_blocks(prompt_token_ids)
        size = self._info.block_size
        full = len(prompt_token_ids) // size
        return _done(ProbeReport(len(prompt_token_ids), full, size, hits, 0, 0, store_available=False))

    def integrity(self) -> Future[tuple[PoolReport, ...]]:
        """One pool that adds up."""
        usable = self._info.num_device_blocks - 1
        with self._changed:
            cached = len(self._state.cached_blocks)
        return _done((PoolReport("device", ok=True, usable=usable, free=usable - cached, leased=0, cached=cached),))

    def drain(self) -> Future[None]:
        """Refuse from now on; done when nothing runs."""
        done: Future[None] = Future()
        with self._changed:
            self._state.draining = True
            self._state.drains.append(done)
            self._settle()
        return done

    def _settle(self) -> None:
        self._changed.notify_all()
        if self._state.draining and not self._state.running:
            drains, self._state.drains = self._state.drains, []
            for done in drains:
                done.set_result(None)

    def _hit_blocks(self, prompt: tuple[int, ...]) -> int:
        """Leading full blocks remembered; at least one token is always left to compute."""
        size, hits = self._info.block_size, 0
        while (hits + 1) * size < len(prompt) and prompt[: (hits + 1) * size] in self._state.cached_blocks:
            hits += 1
        return hits

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._state.running or self._state.closed)
                if self._state.closed:
                    return
                steps = [(entry.sink, self._step(entry)) for entry in self._state.running.values()]
                outputs = [(sink, output) for sink, output in steps if output is not None]
                for _, output in outputs:
                    if output.finish_reason is not None:
                        self._forget(output.request_id)
            for sink, output in outputs:
                sink(output)
            with self._changed:
                self._settle()
                if self._step_s:
                    self._changed.wait_for(lambda: self._state.closed, self._step_s)

    def _step(self, entry: _Running) -> RequestOutput | None:
        request, sampling = entry.request, entry.request.sampling
        try:
            token = next(entry.tokens)
        except StopIteration:
            return RequestOutput(request.request_id, finish_reason=FinishReason.STOP, cached_tokens=entry.cached)
        except ScriptedFailure as error:
            return RequestOutput(request.request_id, finish_reason=FinishReason.ERROR, error=str(error))
        if token is None:
            return None
        entry.emitted += 1
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._info.eos_token_ids))
        reason = FinishReason.LENGTH if entry.emitted >= sampling.max_tokens else None
        reason = FinishReason.STOP if token in ends else reason
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None:
            top = tuple(((token + place) % self._info.vocab_size, -0.5 - place) for place in range(sampling.logprobs))
            logprobs = (TokenLogprob(token, -0.5, top),)
        return RequestOutput(request.request_id, (token,), logprobs, reason, entry.cached)

    def _forget(self, request_id: RequestId) -> None:
        prompt = self._state.running.pop(request_id).request.prompt_token_ids
        size = self._info.block_size
        self._state.cached_blocks |= {prompt[:stop] for stop in range(size, len(prompt) + 1, size)}


def _done(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future
