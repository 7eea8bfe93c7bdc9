"""The side of the engine that other threads see: it checks, counts, and hands over through one inbox.

Everything here may be called from any thread; everything that decides about blocks runs in the engine thread, which
empties the inbox. The lock guards three numbers of this class and nothing of the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.keys import HashChain, effective_model_id
from kvtier_worker.engine.admin import AdminCalls
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
)
from kvtier_worker.engine.ports import WorkerGroup
from kvtier_worker.engine.requests import LiveRequest, drawn_seed, sampling_spec

T = TypeVar("T")

SILENT_S: Final = 60.0
"""A loop that did not turn for so long is not alive; idle ones turn every few seconds."""


def engine_info(settings: WorkerSettings, workers: WorkerGroup) -> EngineInfo:
    """Facts of a started engine; pools are as large as the smallest rank's."""
    ready = workers.ready
    num_device = min(rank.num_device_blocks for rank in ready)
    model_len = min(rank.max_position for rank in ready)
    if settings.max_model_len:
        model_len = min(model_len, settings.max_model_len)
    return EngineInfo(
        model_id=effective_model_id(settings),
        max_model_len=min(model_len, (num_device - 1) * settings.block_size),
        vocab_size=ready[0].vocab_size,
        block_size=settings.block_size,
        num_device_blocks=num_device,
        num_host_slots=min(rank.num_host_slots for rank in ready),
        tp_size=len(ready),
        eos_token_ids=tuple(ready[0].eos_token_ids),
    )


class EngineFront:
    """Implements `EngineClient` up to the inbox.

    Args:
        settings: of the engine.
        info: `engine_info`.
        wake: ends the engine thread's wait.
        clock: seconds, monotonic.
    """

    def __init__(
        self, settings: WorkerSettings, info: EngineInfo, wake: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._settings, self._info, self._wake, self._clock = settings, info, wake, clock
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_live = 0
        self._num_arrived = 0
        self._closed = ""
        self._ended = ""
        self._fatal = ""
        self._last_turn: float | None = None
        self._num_running = 0
        self._admin: AdminCalls

    # EngineClient

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine."""
        return self._info

    @property
    def fatal(self) -> str:
        """Why the engine died; empty = it did not."""
        return self._fatal

    def health(self) -> EngineHealth:
        """Current health; cheap."""
        if self._ended:
            return EngineHealth(alive=False, ready=False, reason=self._ended)
        if self._last_turn is None:
            return EngineHealth(alive=True, ready=False, reason="starting")
        silent_s = self._clock() - self._last_turn
        if silent_s > SILENT_S:
            return EngineHealth(alive=False, ready=False, reason=f"the engine thread is silent for {silent_s:.0f} s")
        return EngineHealth(alive=True, ready=not self._closed, reason=self._closed)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Hand a request to the engine thread. Hashes its prompt in the calling thread.

        Raises:
            EngineBusy, EngineDraining, PromptTooLong: refused; the sink is never called.
        """
        self._check_length(len(request.prompt_token_ids))
        chain = HashChain(self._info.block_size, self._settings.xxh3_128bits_seed, request.extra_key)
        if self._settings.enable_prefix_cache:
            chain.extend(request.prompt_token_ids, len(request.prompt_token_ids) // self._info.block_size)
        with self._lock:
            self._check_open(follows=request.leader is not None)
            self._num_live += 1
            self._num_arrived += 1
            live = self._live_request(request, sink, chain, self._num_arrived)
            self._post(lambda: self._on_submit(live))

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """See `EngineClient`."""
        if not self._ended:  # nobody empties the inbox afterwards
            self._post(lambda: self._on_cancel(request_id, reason))

    def drop_caches(self, tiers: frozenset[Tier]) -> Future[Mapping[Tier, int]]:
        """Forget cached blocks of these tiers; waits for write-backs in flight, so that nothing reappears."""
        future: Future[Mapping[Tier, int]] = Future()
        return self._call(future, lambda: self._admin.drop(tiers, future))

    def probe(self, prompt_token_ids: tuple[int, ...], extra_key: bytes = b"") -> Future[ProbeReport]:
        """What each tier holds of a prompt; changes nothing, not even recency."""
        chain = HashChain(self._info.block_size, self._settings.xxh3_128bits_seed, extra_key)
        hashes = chain.extend(prompt_token_ids, len(prompt_token_ids) // self._info.block_size)
        future: Future[ProbeReport] = Future()
        return self._call(future, lambda: self._admin.probe(len(prompt_token_ids), list(hashes), future))

    def integrity(self) -> Future[tuple[PoolReport, ...]]:
        """Run every pool's check, and ask every worker for its own."""
        future: Future[tuple[PoolReport, ...]] = Future()
        return self._call(future, lambda: self._admin.integrity(future))

    def drain(self) -> Future[None]:
        """Take no more requests, finish running ones, flush write-backs; resolves when idle.

        What still runs after ``--drain_timeout`` is cancelled.
        """
        future: Future[None] = Future()
        with self._lock:
            self._closed = self._closed or "draining"
        return self._call(future, lambda: self._admin.drain(self._clock(), future))

    # for the engine thread

    def _on_submit(self, live: LiveRequest) -> None:
        raise NotImplementedError

    def _on_cancel(self, request_id: RequestId, reason: FinishReason) -> None:
        raise NotImplementedError

    def _empty_inbox(self) -> None:
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command()

    def _request_gone(self) -> None:
        with self._lock:
            self._num_live -= 1

    def _close(self, reason: str, *, fatal: bool) -> None:
        """Refuse everything from now on; what is in the inbox already finds `_ended` set."""
        with self._lock:
            self._closed = self._ended = reason
            self._fatal = reason if fatal else ""

    # private

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.put(command)
        self._wake()

    def _call(self, future: Future[T], command: Callable[[], None]) -> Future[T]:
        future.set_running_or_notify_cancel()  # from here on the caller cannot cancel it under the engine's hands

        def serve() -> None:
            if self._ended:
                future.set_exception(EngineDraining(self._ended))
            else:
                command()

        with self._lock:
            if self._ended:
                serve()
            else:
                self._post(serve)
        return future

    def _check_open(self, *, follows: bool) -> None:
        """Choices that follow a leader were counted with it: a client's request is taken whole or not at all."""
        if self._closed:
            msg = f"the engine takes no more requests: {self._closed}"
            raise EngineDraining(msg)
        if follows:
            return
        if self._num_live >= self._settings.max_concurrent_requests:
            msg = f"{self._num_live} requests are in the engine, --max_concurrent_requests allows no more"
            raise EngineBusy(msg)
        num_waiting = self._num_live - self._num_running
        if num_waiting >= self._settings.request_queue_size:
            msg = f"{num_waiting} requests wait, --request_queue_size allows no more"
            raise EngineBusy(msg)

    def _check_length(self, num_tokens: int) -> None:
        limit = self._info.max_model_len - 1
        if not self._settings.enable_chunked_prefill:
            limit = min(limit, self._settings.max_tokens_per_batch)
        if num_tokens > limit:
            msg = f"the prompt has {num_tokens} tokens; at most {limit} leave room for an output of one token"
            raise PromptTooLong(msg)

    def _live_request(self, request: EngineRequest, sink: OutputSink, chain: HashChain, order: int) -> LiveRequest:
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = drawn_seed(request.request_id, self._settings.seed)
        eos = () if sampling.ignore_eos else self._info.eos_token_ids
        live = LiveRequest(
            request=request,
            sink=sink,
            order=order,
            chain=chain,
            tokens=list(request.prompt_token_ids),
            max_len=self._info.max_model_len,
            stop_ids=frozenset((*sampling.stop_token_ids, *eos)),
            sampling=sampling_spec(sampling, seed),
            last_token_at=self._clock(),
        )
        if self._settings.priority_strategy == "priority":
            live.rank_key = (request.priority, order)
        return live
