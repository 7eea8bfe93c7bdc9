"""An engine that is still starting: probes are answered from the first moment, requests refused with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.engine.frontend import (
    EngineClient,
    EngineDraining,
    EngineHealth,
    EngineInfo,
    EngineRequest,
    FinishReason,
    OutputSink,
    PoolReport,
    ProbeReport,
)


class LateEngine:
    """An `EngineClient` that passes everything on to the real one once `attach` has been called.

    Written by the thread that starts the engine, read by the event loop: one reference each, swapped whole.
    """

    def __init__(self) -> None:
        self._engine: EngineClient | None = None
        self._health = EngineHealth(alive=True, ready=False, reason="starting")

    def progress(self, reason: str) -> None:
        """Say what the start is waiting for."""
        self._health = EngineHealth(alive=True, ready=False, reason=reason)

    def attach(self, engine: EngineClient) -> None:
        """Serve from now on."""
        self._engine = engine

    def fail(self, reason: str) -> None:
        """The engine is gone, or never came."""
        self._engine = None
        self._health = EngineHealth(alive=False, ready=False, reason=reason)

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine. Raises EngineDraining before."""
        return self._started().info

    def health(self) -> EngineHealth:
        """The engine's health, or what its start is waiting for."""
        engine = self._engine
        return self._health if engine is None else engine.health()

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Pass on. Raises EngineDraining before the start is over."""
        self._started().submit(request, sink)

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Pass on; nothing to cancel before the start is over."""
        engine = self._engine
        if engine is not None:
            engine.cancel(request_id, reason)

    def drop_caches(self, tiers: frozenset[Tier]) -> Future[Mapping[Tier, int]]:
        """Pass on. Raises EngineDraining before the start is over."""
        return self._started().drop_caches(tiers)

    def probe(self, prompt_token_ids: tuple[int, ...], extra_key: bytes = b"") -> Future[ProbeReport]:
        """Pass on. Raises EngineDraining before the start is over."""
        return self._started().probe(prompt_token_ids, extra_key)

    def integrity(self) -> Future[tuple[PoolReport, ...]]:
        """Pass on. Raises EngineDraining before the start is over."""
        return self._started().integrity()

    def drain(self) -> Future[None]:
        """Pass on; an engine that has not started has nothing to drain."""
        engine = self._engine
        if engine is not None:
            return engine.drain()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _started(self) -> EngineClient:
        engine = self._engine
        if engine is None:
            raise EngineDraining(f"not ready: {self._health.reason}; try again later")
        return engine
