"""Starts, watches and stops the processes of a cluster on this machine. IO; used by `local`, the demo and tests.

Every process leads a session and process group of its own: a Ctrl-C at the terminal reaches only us, and we stop them
in order. What a leader leaves in its group is killed with it, and if we are killed ourselves the kernel ends them (see
`child`). One thread owns a `LocalCluster`; it must live as long as the cluster does, because the kernel ties a child to
the thread that made it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier_operator import child
from kvtier_operator.errors import Interrupted, MachineError, ProcessFailed
from kvtier_operator.probes import busy_ports, waiting_for
from kvtier_operator.resources.processes import ProcessSpec

POLL_S = 0.05
PROGRESS_EVERY_S = 5.0
PROGRESS_AT_CHANGE_S = 1.0
LOG_TAIL_LINES = 20

Say = Callable[[str], None]
"""Takes one line of progress for the user."""


class StopRequest:
    """The user's wish to stop: asked once, everything stops in order; asked again, at once. Safe in signal handlers.

    Plain flags: a `threading.Event` has a lock, and a handler that runs while its own thread holds it waits for ever.
    """

    def __init__(self) -> None:
        self._asked = False
        self._insisted = False

    def ask(self) -> None:
        """Ask to stop; the second time insists."""
        self._insisted = self._insisted or self._asked
        self._asked = True

    @property
    def asked(self) -> bool:
        """Stop in order."""
        return self._asked

    @property
    def insisted(self) -> bool:
        """Stop at once."""
        return self._insisted

    def wait(self, seconds: float) -> bool:
        """Sleep until asked, for ``seconds`` at most. True when asked."""
        deadline = time.monotonic() + seconds
        while not self._asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
        return self._asked


class LocalCluster:
    """The running processes of one cluster.

    Args:
        processes: in start order.
        log_dir: gets one file per process.
        say: gets progress lines.
        stop_request: ends `start` early and shortens `stop`.
    """

    def __init__(
        self, processes: Sequence[ProcessSpec], log_dir: Path, say: Say, stop_request: StopRequest | None = None
    ) -> None:
        self._specs = {process.name: process for process in processes}
        self._log_dir = log_dir
        self._say = say
        self._stop_request = stop_request or StopRequest()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

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
        process = self._children.get(name)
        return process.pid if process else None

    def start(self) -> None:
        """Start everything in order, each when the one before is ready. On failure nothing stays behind.

        Raises:
            MachineError: ports in use, or no folder for logs; nothing was started.
            ProcessFailed: one of them ended or was not ready in time.
            Interrupted: asked to stop meanwhile.
        """
        if problems := busy_ports(tuple(self._specs.values())):
            raise MachineError(problems)
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(
                [f"no folder for logs at {self._log_dir}: {error.strerror}; choose --state-dir"]
            ) from error
        with ExitStack() as undo:
            undo.callback(self.stop)
            for name in self.names:
                self.log_path(name).unlink(missing_ok=True)
                self.start_process(name)
            undo.pop_all()

    def stop(self) -> None:
        """Stop everything in reverse order. Does nothing the second time."""
        for name in reversed(self.names):
            self.stop_process(name)

    def start_process(self, name: str) -> None:
        """Start one process and wait until it is ready.

        Raises:
            ProcessFailed, Interrupted: as `start`; it does not stop the others.
        """
        assert name not in self._children, f"{name} is running"
        spec = self._specs[name]
        with self.log_path(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *spec.argv),
                env=os.environ | spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_ready(spec)

    def stop_process(self, name: str) -> None:
        """SIGTERM, then SIGKILL for whatever remains after the process's time. Does nothing when it is not running."""
        process = self._children.get(name)
        if process is None:
            return
        if not _has_ended(process):
            self._say(f"{name}: stopping")
            process.terminate()
        deadline = time.monotonic() + self._specs[name].stop_timeout_s
        while not _has_ended(process) and not self._stop_request.insisted:
            if time.monotonic() > deadline:
                self._say(f"{name}: did not stop in {self._specs[name].stop_timeout_s:.0f} s, killed")
                break
            time.sleep(POLL_S)
        _kill_group(process)
        process.wait()
        del self._children[name]

    def kill_process(self, name: str) -> None:
        """SIGKILL the process and its group, as a crash does, and forget it."""
        process = self._children.pop(name)
        _kill_group(process)
        process.wait()

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

    def _check_processes(self) -> None:
        for name, process in self._children.items():
            if _has_ended(process):
                raise ProcessFailed(name, _how_it_ended(process), self.log_tail(name))

    def watch(self) -> None:
        """Return when asked to stop.

        Raises:
            ProcessFailed: a process ended first.
        """
        while not self._stop_request.wait(POLL_S * 4):
            self._check_processes()

    def log_path(self, name: str) -> Path:
        """The file with everything that a process wrote."""
        return self._log_dir / f"{name}.log"

    def log_tail(self, name: str, lines: int = LOG_TAIL_LINES) -> tuple[str, ...]:
        """The last lines that a process wrote."""
        with self.log_path(name).open(encoding="utf-8", errors="replace") as log:
            return tuple(line.rstrip("\n") for line in deque(log, maxlen=lines))

    def _wait_ready(self, spec: ProcessSpec) -> None:
        started = time.monotonic()
        said, said_at = "", started
        while True:
            self._check_processes()
            waiting = next(filter(None, map(waiting_for, spec.probes)), "")
            now = time.monotonic()
            if not waiting:
                self._say(f"{spec.name}: ready after {now - started:.1f} s")
                return
            if now - started > spec.start_timeout_s:
                reason = f"was not ready after {spec.start_timeout_s:.0f} s: {waiting}"
                raise ProcessFailed(spec.name, reason, self.log_tail(spec.name))
            if now - said_at > (PROGRESS_EVERY_S if waiting == said else PROGRESS_AT_CHANGE_S):
                self._say(f"{spec.name}: {waiting} ({now - started:.0f} s)")
                said, said_at = waiting, now
            if self._stop_request.wait(POLL_S):
                raise Interrupted(f"stopped while {spec.name} was starting")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """True when the process ended. Leaves it to be reaped, so that its group's number stays taken."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None, "waitid without WNOHANG waits"
    if end.si_code == os.CLD_EXITED:
        return f"ended with exit status {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    # A group vanishes only with its last member; its leader, ended or not, is not reaped yet.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
