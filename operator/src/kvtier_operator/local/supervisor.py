"""Starts, watches, restarts and stops the processes of a cluster on this machine. IO; used by `up`, demo and tests.

A Ctrl-C at the terminal reaches only us, and we stop the processes in order; if we are killed ourselves the kernel ends
them (see `child`). One thread owns a `LocalCluster`; it must live as long as the cluster does, because the kernel ties
a child to the thread that made it.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier_operator.errors import Interrupted, MachineError, ProcessFailed
from kvtier_operator.local.console import POLL_S, Say, StopRequest
from kvtier_operator.local.lives import Life
from kvtier_operator.local.probes import busy_ports
from kvtier_operator.local.report import ProcessState
from kvtier_operator.local.restarts import DELAYS_S
from kvtier_operator.local.state import StateFile
from kvtier_operator.resources.processes import HttpProbe, ProcessSpec

LOG_TAIL_LINES = 20


class LocalCluster:
    """The running processes of one cluster.

    Args:
        processes: in start order.
        log_dir: gets one file per process.
        say: gets progress lines.
        stop_request: ends `start` early and shortens `stop`.
        state_file: tells others what runs.
        restart_delays_s: before each restart of a row; after the last one the cluster gives up.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        log_dir: Path,
        say: Say,
        stop_request: StopRequest | None = None,
        *,
        state_file: StateFile | None = None,
        restart_delays_s: Sequence[float] = DELAYS_S,
    ) -> None:
        self._specs = {process.name: process for process in processes}
        self._log_dir = log_dir
        self._say = say
        self._stop_request = stop_request or StopRequest()
        self._state_file = state_file
        self._restart_delays_s = restart_delays_s
        self._is_recorded = True
        self._lives: dict[str, Life] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def names(self) -> tuple[str, ...]:
        """Every process, in start order."""
        return tuple(self._specs)

    def pid(self, name: str) -> int | None:
        """Process id; None when it is not running."""
        life = self._lives.get(name)
        return life.pid if life else None

    def restarts(self, name: str) -> int:
        """How often it was started again because it had ended by itself."""
        life = self._lives.get(name)
        return life.restarts if life else 0

    def start(self) -> None:
        """Start everything in order, each batch when the one before is ready. On failure nothing stays behind.

        Raises:
            MachineError: ports in use, the cluster runs already, or no folder for logs; nothing was started.
            ProcessFailed: one of them ended or was not ready in time.
            Interrupted: asked to stop meanwhile.
        """
        self._prepare()
        with ExitStack() as undo:
            undo.callback(self.stop)
            for _, batch in groupby(self._specs.values(), key=lambda spec: spec.batch or spec.name):
                names = [spec.name for spec in batch]
                for name in names:
                    self._launch(name)
                self._wait_ready(names)
            undo.pop_all()

    def stop(self) -> None:
        """Stop everything in reverse order. Does nothing the second time."""
        for name in reversed(self.names):
            self.stop_process(name)
        if self._state_file:
            self._state_file.remove()

    def start_process(self, name: str) -> None:
        """Start one process and wait until it is ready.

        Raises:
            ProcessFailed, Interrupted: as `start`; it does not stop the others.
        """
        assert name not in self._lives, f"{name} is running"
        self._launch(name)
        self._wait_ready([name])

    def stop_process(self, name: str) -> None:
        """SIGTERM, then SIGKILL for whatever remains after the process's time. Does nothing when it is not running."""
        if life := self._lives.pop(name, None):
            life.stop(self._stop_request)
            self._record()

    def restart(self, name: str) -> None:
        """Stop one process, start it again with the same command and wait until it is ready."""
        self.stop_process(name)
        self.start_process(name)

    def check(self) -> None:
        """Notice a process that ended by itself, and the wish to stop.

        Raises:
            ProcessFailed: with its exit status and the end of its log.
            Interrupted: asked to stop.
        """
        if self._stop_request.asked:
            raise Interrupted("stopped before it was done")
        self._check_processes()

    def watch(self) -> None:
        """Start again what ends by itself, until asked to stop.

        Raises:
            ProcessFailed: a process fails again and again.
        """
        while not self._stop_request.wait(POLL_S * 4):
            for name, life in tuple(self._lives.items()):
                self._keep_alive(name, life)

    def log_path(self, name: str) -> Path:
        """The file with everything that a process wrote."""
        return self._log_dir / f"{name}.log"

    def log_tail(self, name: str, lines: int = LOG_TAIL_LINES) -> tuple[str, ...]:
        """The last lines that a process wrote; none if somebody removed its log."""
        try:
            with self.log_path(name).open(encoding="utf-8", errors="replace") as log:
                return tuple(line.rstrip("\n") for line in deque(log, maxlen=lines))
        except OSError:
            return ()

    def _prepare(self) -> None:
        if self._state_file and (pid := self._state_file.holder()):
            problem = f"the cluster runs already, by pid {pid}: stop that one, or choose another --state-dir"
            raise MachineError([problem])
        owners = {
            port: f"cluster {one.cluster} (pid {one.pid})"
            for one in (self._state_file.neighbours() if self._state_file else ())
            for process in one.processes
            for port in process.ports
        }
        if problems := busy_ports(tuple(self._specs.values()), owners):
            raise MachineError(problems)
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._state_file:
                self._state_file.claim()
            for spec in self._specs.values():
                self.log_path(spec.name).unlink(missing_ok=True)
                if spec.data_dir:
                    shutil.rmtree(spec.data_dir, ignore_errors=True)
                    Path(spec.data_dir).mkdir(parents=True, mode=0o700)
        except OSError as error:
            folder = error.filename or self._log_dir
            raise MachineError([f"no folder at {folder}: {error.strerror}; choose --state-dir"]) from error

    def _launch(self, name: str) -> None:
        try:
            self._lives[name] = Life(self._specs[name], self.log_path(name), self._say, self._restart_delays_s)
        except OSError as error:
            raise ProcessFailed(name, f"cannot be started: {error.strerror}", ()) from error
        self._record()

    def _wait_ready(self, names: Sequence[str]) -> None:
        waiting = list(names)
        while True:
            self._check_processes()
            waiting = [name for name in waiting if not self._lives[name].becomes_ready()]
            if not waiting:
                return
            for name in waiting:
                if late := self._lives[name].lateness():
                    raise ProcessFailed(name, late, self.log_tail(name))
            if self._stop_request.wait(POLL_S):
                raise Interrupted(
                    f"stopped while {' and '.join(waiting)} {'was' if len(waiting) == 1 else 'were'} starting"
                )

    def _check_processes(self) -> None:
        for name, life in self._lives.items():
            if ending := life.ending():
                raise ProcessFailed(name, ending, self.log_tail(name))

    def _keep_alive(self, name: str, life: Life) -> None:
        if life.is_due:
            self._restart(name, life)
        elif ending := life.ending():
            self._plan_restart(name, life, ending)
        elif life.is_starting and not life.becomes_ready() and (late := life.lateness()):
            self._plan_restart(name, life, late)

    def _restart(self, name: str, life: Life) -> None:
        try:
            life.restart()
        except OSError as error:
            self._plan_restart(name, life, f"cannot be started: {error.strerror}")
        else:
            self._record()

    def _plan_restart(self, name: str, life: Life, reason: str) -> None:
        delay_s = life.fail()
        self._record()
        if delay_s is None:
            raise ProcessFailed(name, f"{reason}, failure {life.failures} in a row", self.log_tail(name))
        when = f" in {delay_s:.0f} s" if delay_s else ""
        self._say(f"{name}: {reason}; starting it again{when} (log: {self.log_path(name)})")

    def _record(self) -> None:
        if not self._state_file:
            return
        try:
            self._state_file.write([self._state_of(spec) for spec in self._specs.values()])
            self._is_recorded = True
        except OSError as error:
            if self._is_recorded:
                self._say(f"{error.filename} cannot be written ({error.strerror}): `kvtier status` shows what was")
            self._is_recorded = False

    def _state_of(self, spec: ProcessSpec) -> ProcessState:
        probes = (probe.url for probe in spec.probes if isinstance(probe, HttpProbe))
        return ProcessState(
            name=spec.name,
            component=str(spec.component or ""),
            pid=self.pid(spec.name) or 0,
            restarts=self.restarts(spec.name),
            url=spec.url,
            probe_url=next(probes, ""),
            ports=spec.ports,
        )
