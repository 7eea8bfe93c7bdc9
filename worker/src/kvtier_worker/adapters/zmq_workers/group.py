"""The worker processes of one engine, reached over ZeroMQ: the engine process's `WorkerGroup`.

Imports no torch. Sockets are unix sockets in a private folder. Every rank has its own request socket, all share one
for answers, so nothing is ever addressed to the wrong rank and a send never waits for a slow one.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import zmq

from kvtier_worker.adapters.zmq_workers.process import WorkerProcess
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.messages import (
    PROTOCOL_VERSION,
    FromWorker,
    Shutdown,
    ToWorker,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from kvtier_worker.engine.wire import decode_from_worker, encode
from kvtier_worker.engine.worker_start import WorkerStart
from kvtier_worker.errors import ConfigError, ProtocolError, WorkerDied

WORKER_COMMAND = (sys.executable, "-m", "kvtier_worker.worker_main")
_TICK_S = 0.5
_LAST_WORDS_S = 0.5
_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long a compute thread spins for its next piece of work before it sleeps; OpenMP's default is 30 times this.

Measured on two cores: nothing lost where nobody else computes, and beside one busy process a token takes 0.2 s instead
of 2 s, because a spinning thread keeps its core from the one it waits for. An environment that sets it is left alone.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """How worker processes are started.

    Attributes:
        env: their environment.
        command: program and arguments.
        progress: called with one line of text whenever the start gets further; may raise to give up.
        check: called at least every half second during the start; may raise to give up.
    """

    env: Mapping[str, str]
    command: Sequence[str] = WORKER_COMMAND
    progress: Callable[[str], None] = lambda _text: None
    check: Callable[[], None] = lambda: None


class ZmqWorkerGroup:
    """See `WorkerGroup`. Made by `start`; from then on used by one thread, except for `wake`."""

    def __init__(self, settings: WorkerSettings, launch: Launch) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvtier-workers-")
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()  # `wake` must not write to a descriptor that `close` gave back
        self._answers = self._context.socket(zmq.PULL)
        self._answers.set_hwm(0)
        self._answers.bind(self._endpoint("answers"))
        self._requests: dict[int, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._answers, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._processes: list[WorkerProcess] = []
        self._ready: list[WorkerReady] = []
        self._closed = False
        self._launch(settings, launch)

    @classmethod
    def start(cls, settings: WorkerSettings, launch: Launch) -> ZmqWorkerGroup:
        """Start one process per rank and wait until all of them can serve.

        Raises:
            ConfigError: workers refuse the settings.
            WorkerDied: a worker ended first.
            ProtocolError: a worker speaks another version.
        """
        group = cls(settings, launch)
        try:
            group._await_ready(launch)
        except BaseException:  # also Ctrl-C: whatever stops the start must not leave processes behind
            group.close(timeout_s=0.0)
            raise
        return group

    @property
    def ready(self) -> Sequence[WorkerReady]:
        """See `WorkerGroup`."""
        return tuple(self._ready)

    @property
    def pids(self) -> Sequence[int]:
        """Process id of every rank, in rank order."""
        return tuple(process.pid for process in self._processes)

    def send(self, message: ToWorker) -> None:
        """See `WorkerGroup`."""
        self._check_alive()
        frame = encode(message)
        for process in self._processes:
            self._requests[process.rank].send(frame)

    def poll(self, timeout_s: float) -> Sequence[FromWorker]:
        """See `WorkerGroup`."""
        messages: list[FromWorker] = []
        for message in self._receive(timeout_s):
            if isinstance(message, WorkerFailed):
                # A rank that loses another one in a collective often says so before the other's death is seen.
                first = self._deaths(but=message.rank)
                raise WorkerDied("; ".join([*first, f"worker of rank {message.rank} gave up: {message.error}"]))
            if not isinstance(message, WorkerProgress):
                messages.append(message)
        if not messages:  # answers of a dead worker are delivered before its death
            self._check_alive()
        return messages

    def wake(self) -> None:
        """See `WorkerGroup`."""
        with self._waking:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float) -> None:
        """See `WorkerGroup`."""
        with self._waking:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            for request in self._requests.values():
                request.send(encode(Shutdown()))
        for process in self._processes:
            process.end(deadline)
        self._context.destroy(linger=0)
        os.close(self._wake)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self, rank: int) -> None:
        """Reach a rank that listens already: what is sent from now on is queued and never lost or blocked."""
        request = self._context.socket(zmq.PUSH)
        request.set_hwm(0)
        request.connect(self._endpoint(f"rank{rank}"))
        self._requests[rank] = request

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"

    def _launch(self, settings: WorkerSettings, launch: Launch) -> None:
        rendezvous = _rendezvous(settings)
        shown = replace(settings, api_key="")
        env = _SPIN | {key: value for key, value in launch.env.items() if key != "KVTIER_API_KEY"}
        for rank in range(settings.tp_size):
            start = WorkerStart(shown, rank, self._endpoint(f"rank{rank}"), self._endpoint("answers"), rendezvous)
            process = WorkerProcess(launch.command, start, env)
            self._processes.append(process)
            self._poller.register(process.death_fd, zmq.POLLIN)

    def _await_ready(self, launch: Launch) -> None:
        progress = launch.progress
        ready: dict[int, WorkerReady] = {}
        while len(ready) < len(self._processes):
            launch.check()
            messages = self._receive(_TICK_S)
            for message in messages:
                match message:
                    case WorkerProgress():
                        progress(f"rank {message.rank}: {message.text}")
                    case WorkerReady():
                        _check_version(message)
                        ready[message.rank] = message
                        self._connect(message.rank)
                        progress(f"rank {message.rank}: ready")
                    case WorkerFailed():
                        self._raise_failures(message)
                    case _:
                        msg = f"rank sent {type(message).__name__} before it was ready"
                        raise ProtocolError(msg)
            if not messages:
                self._check_alive()
        self._ready = [ready[rank] for rank in sorted(ready)]

    def _raise_failures(self, first: WorkerFailed) -> None:
        """Raise what a rank reports; other ranks get a moment to report theirs, so that all is said at once."""
        failures = [first]
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(failures) < len(self._processes) and (left := deadline - time.monotonic()) > 0:
            failures += [message for message in self._receive(left) if isinstance(message, WorkerFailed)]
        violations = dict.fromkeys(text for failure in failures for text in failure.violations)
        if violations:
            raise ConfigError(tuple(violations))
        msg = "; ".join(f"worker of rank {failure.rank} cannot start: {failure.error}" for failure in failures)
        raise WorkerDied(msg)

    def _receive(self, timeout_s: float) -> list[FromWorker | WorkerProgress]:
        """Everything that arrived, after waiting for the first thing to happen."""
        ready = dict(self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        messages: list[FromWorker | WorkerProgress] = []
        while True:
            try:
                messages.append(decode_from_worker(self._answers.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def _check_alive(self) -> None:
        deaths = self._deaths()
        if deaths:
            raise WorkerDied(deaths[0])

    def _deaths(self, *, but: int | None = None) -> list[str]:
        return [
            f"worker of rank {process.rank} (pid {process.pid}) died: {ended}; its output is above"
            for process in self._processes
            if process.rank != but and (ended := process.how_it_ended())
        ]


def _check_version(message: WorkerReady) -> None:
    if message.version != PROTOCOL_VERSION:
        msg = f"worker of rank {message.rank} speaks version {message.version}, this engine {PROTOCOL_VERSION}"
        raise ProtocolError(msg)


def _rendezvous(settings: WorkerSettings) -> str:
    """Where the ranks meet; a free port where none is named."""
    if settings.tp_size == 1:
        return ""
    host, _, port = settings.master_node_addr.rpartition(":")
    if port != "0":
        return settings.master_node_addr
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
