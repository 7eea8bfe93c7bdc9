"""The life of an engine process: listen, start the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics

from kvtier_worker.adapters.zmq_workers import Launch, ZmqWorkerGroup
from kvtier_worker.api.app import create_admin_app, create_app
from kvtier_worker.api.late import LateEngine
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.contract.rules import violation
from kvtier_worker.core.keys import effective_model_id
from kvtier_worker.engine.loop import EngineLoop
from kvtier_worker.errors import ConfigError, KVTierError
from kvtier_worker.log import event
from kvtier_worker.machine.ports import hold_port

_log = logging.getLogger(__name__)

_FLUSH_S = 30.0
"""What a drain may take beyond ``--drain_timeout``: write-backs under way."""

_ANSWER_S = 2
"""What open connections get to read their last bytes when the engine is gone."""

_CLOSE_S = 10.0
"""What workers get to end in order."""

_END_S = _CLOSE_S + 5.0
"""What the engine thread gets to end after that; the workers die with this process."""


class ExitCode(IntEnum):
    """Exit codes of ``kvtier engine``."""

    STOPPED = 0
    DIED = 1
    BAD_SETTINGS = 2


class StartAbandoned(KVTierError):
    """The process was told to stop while it was starting."""


class EngineDied(KVTierError):
    """The engine cannot go on; the message says why."""


class EngineThread:
    """Starts the workers, runs the loop, closes the workers: all that the engine thread does.

    Args:
        settings: validated.
        env: for the worker processes.
        late: what the front talks to; gets the engine once it runs.
        metrics: the front's; gets the engine's beside its own.
        loop: the event loop that is told of the end.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        env: Mapping[str, str],
        late: LateEngine,
        metrics: FrontMetrics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._settings = settings
        self._env = env
        self._late = late
        self._metrics = metrics
        self._loop = loop
        self._abandoned = threading.Event()
        self._engine: EngineLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: asyncio.Future[BaseException | None] = loop.create_future()
        """Resolves with why the thread ended; None = it was asked to."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def abandon(self) -> None:
        """Stop as soon as possible, in whatever state; any thread."""
        self._abandoned.set()
        if self._engine is not None:
            self._engine.stop()

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            self._start_and_serve()
        except StartAbandoned:
            pass
        except Exception as error:  # noqa: BLE001 - the top of this thread: whatever it is ends the process
            problem = error
        if problem is not None:
            self._late.fail(str(problem))
        with contextlib.suppress(RuntimeError):  # the event loop did not wait for us
            self._loop.call_soon_threadsafe(self._report, problem)

    def _report(self, problem: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(problem)

    def _start_and_serve(self) -> None:
        began = time.monotonic()
        launch = Launch(env=self._env, progress=self._progress, check=self._check)
        group = ZmqWorkerGroup.start(self._settings, launch)
        try:
            engine = EngineLoop(self._settings, group)
            self._engine = engine
            self._check()
            self._metrics.include(engine.metrics.registry)
            self._late.attach(engine)
            self._announce(engine, time.monotonic() - began)
            died = engine.run()
            if died:
                raise EngineDied(died)
        finally:
            group.close(_CLOSE_S)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise StartAbandoned

    def _progress(self, text: str) -> None:
        self._late.progress(text)
        event(_log, "loading", progress=text)

    def _announce(self, engine: EngineLoop, took_s: float) -> None:
        info, settings = engine.info, self._settings
        event(
            _log,
            "serving",
            url=_url(settings.host, settings.port),
            model=info.model_id,
            ranks=info.tp_size,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            device_blocks=info.num_device_blocks - 1,
            host_blocks=max(info.num_host_slots - 1, 0),
            store=settings.store_master_server_address if settings.enable_kvcache_store else "off",
            start_s=took_s,
        )


class EngineProcess:
    """Everything of one engine process but its command line.

    Args:
        settings: validated.
        tokenizer: of the model.
        env: environment for the worker processes.

    Raises:
        ConfigError: a port was taken after it had been checked.
    """

    def __init__(self, settings: WorkerSettings, tokenizer: TextTokenizer, env: Mapping[str, str]) -> None:
        self._settings = settings
        self._env = env
        self._late = LateEngine()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # timestamps double a scrape and tell nothing
        self._metrics = FrontMetrics(CollectorRegistry())
        parts = (self._late, tokenizer, settings, self._metrics)
        self._servers = [(_server(create_app(*parts)), _socket(settings, "port"))]
        if settings.admin_port:
            self._servers.append((_server(create_admin_app(*parts)), _socket(settings, "admin_port")))
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        """Serve until told to stop or until the engine dies; returns the exit code.

        Raises:
            ConfigError: the workers refuse the settings: they know more of the machine.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        settings = self._settings
        event(_log, "starting", version=version("kvtier"), model=settings.model, model_id=effective_model_id(settings))
        for warning in settings.warnings():
            event(_log, "no_effect", level=logging.WARNING, setting=warning)
        fronts = [asyncio.create_task(server.serve(sockets=[held])) for server, held in self._servers]
        event(_log, "listening", url=_url(settings.host, settings.port))
        if settings.admin_port:
            event(_log, "listening", admin=_url(settings.host, settings.admin_port))
        thread = EngineThread(settings, self._env, self._late, self._metrics, loop)
        thread.start()
        problem = await self._until_end(thread)
        for server, _ in self._servers:
            server.should_exit = True
        await asyncio.gather(*fronts)
        code = _exit_code(problem)
        event(_log, "stopped", exit_code=int(code))
        return code

    async def _until_end(self, thread: EngineThread) -> BaseException | None:
        """Wait for a signal and then for the engine's end; returns what went wrong."""
        told = asyncio.create_task(self._signals.get())
        await _first({told, thread.ended})
        if told.done():
            event(_log, "draining", signal=told.result().name, timeout_ms=self._settings.drain_timeout)
            await self._drain(thread)
            thread.abandon()
        told.cancel()
        await _first({thread.ended}, _END_S)
        if thread.ended.done():
            return thread.ended.result()
        event(_log, "workers_slow_to_end", level=logging.WARNING, waited_s=_END_S)
        return None

    async def _drain(self, thread: EngineThread) -> None:
        """Wait until the engine is idle, a second signal comes, the engine dies, or time is up."""
        idle = asyncio.ensure_future(asyncio.wrap_future(self._late.drain()))
        again = asyncio.create_task(self._signals.get())
        budget_s = self._settings.drain_timeout / 1e3 + _FLUSH_S
        done = await _first({idle, again, thread.ended}, budget_s)
        if again in done:
            event(_log, "drain_cut_short", level=logging.WARNING, signal=again.result().name)
        elif not done:
            event(_log, "drain_gave_up", level=logging.WARNING, waited_s=budget_s)
        again.cancel()
        idle.cancel()
        await asyncio.gather(again, idle, return_exceptions=True)


async def _first(waits: set[asyncio.Future[Any]], timeout_s: float | None = None) -> set[asyncio.Future[Any]]:
    """Those that are done when the first one is, or none after ``timeout_s``; cancels nothing."""
    done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return done


def _exit_code(problem: BaseException | None) -> ExitCode:
    """Log what went wrong and say how the process ends; raises a ConfigError again, for the command line to tell."""
    if problem is None:
        return ExitCode.STOPPED
    if isinstance(problem, ConfigError):
        raise problem
    known = isinstance(problem, KVTierError)
    _log.error("engine_died reason=%r", str(problem), exc_info=None if known else problem)
    return ExitCode.DIED


class _Server(uvicorn.Server):
    """Uvicorn with our signals: it must not end before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _server(app: FastAPI) -> _Server:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_ANSWER_S,
        server_header=False,
    )
    return _Server(config)


def _socket(settings: WorkerSettings, name: str) -> socket.socket:
    try:
        return hold_port(settings.host, getattr(settings, name))
    except OSError as error:
        problem = f"cannot listen on {settings.host}: {error.strerror or error}"
        raise ConfigError([violation(settings, name, problem, f"free it, or choose another --{name}")[1]]) from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
