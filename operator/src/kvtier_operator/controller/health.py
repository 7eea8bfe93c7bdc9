"""The operator's HTTP ports: metrics, liveness and readiness. IO."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvtier_operator.errors import MachineError

LONGEST_LAG_S = 60.0
LONGEST_SILENCE_S = 210.0
_BEAT_S = 1.0
_UNAVAILABLE = 503


@dataclass(slots=True)
class Heart:
    """Measures by how much the event loop is late. `run` is a task."""

    lag_s: float = 0.0
    _expected: float = field(default_factory=lambda: time.monotonic() + _BEAT_S)

    def late_s(self) -> float:
        """The lag as last measured, or the one that grows right now."""
        return max(self.lag_s, time.monotonic() - self._expected)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._expected = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.lag_s = max(0.0, time.monotonic() - self._expected)


@dataclass(slots=True)
class HttpPorts:
    """Serves. An async context manager.

    Args:
        host: to listen on.
        metrics_port: of /metrics; 0 = none.
        liveness_port: of /healthz and /readyz; 0 = none.
        registry: of the metrics.
        alive: what is wrong with this process so that only a restart helps; empty = nothing.
        ready: what it still waits for; empty = nothing.
    """

    host: str
    metrics_port: int
    liveness_port: int
    registry: CollectorRegistry
    alive: Callable[[], str]
    ready: Callable[[], str]
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        if self.metrics_port:
            await self._serve("--metrics_port", self.metrics_port, {"/metrics": self._metrics})
        if self.liveness_port:
            routes = {"/healthz": _verdict(self.alive), "/readyz": _verdict(self.ready)}
            await self._serve("--liveness_port", self.liveness_port, routes)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _serve(self, flag: str, port: int, routes: Mapping[str, Callable[[web.Request], web.Response]]) -> None:
        app = web.Application()
        for path, answer in routes.items():
            app.router.add_get(path, _handler(answer))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, self.host, port).start()
        except OSError as error:
            await self._stack.aclose()
            raise MachineError([f"{flag}={port}: cannot listen on {self.host}: {error.strerror}"]) from error

    def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _handler(answer: Callable[[web.Request], web.Response]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    return handle


def _verdict(problem: Callable[[], str]) -> Callable[[web.Request], web.Response]:
    def answer(_request: web.Request) -> web.Response:
        words = problem()
        return web.Response(text=f"{words or 'ok'}\n", status=_UNAVAILABLE if words else 200)

    return answer
