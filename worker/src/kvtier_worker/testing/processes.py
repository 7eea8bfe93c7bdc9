"""Child processes for tests and benches: free ports, a log file each, wait until ready, never left behind.

Callers own the process through a context manager; leaving it stops the child, whatever happened inside.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PORT_RANGE = (20000, 32000)
"""Below the kernel's ephemeral range, so that no outgoing connection takes a port between check and use."""

_TAIL_BYTES = 4000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` distinct ports that nobody listens on, checked by binding them all at once."""
    chooser = random.SystemRandom()
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            candidate = socket.socket()
            try:
                candidate.bind((host, chooser.randrange(*PORT_RANGE)))
            except OSError:
                candidate.close()
                continue
            held.append(candidate)
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def free_port(host: str = "127.0.0.1") -> int:
    """One port that nobody listens on."""
    return free_ports(1, host)[0]


def port_answers(port: int, host: str = "127.0.0.1", timeout_s: float = 1.0) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def http_status(port: int, path: str, host: str = "127.0.0.1", timeout_s: float = 2.0) -> int:
    """Status code of a GET; 0 when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@dataclass(slots=True)
class ChildProcess:
    """A process we started, with its output in a file."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    log_path: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kvtier-")) / "log")
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; its output is appended to `log_path`."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.argv), stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment}
            )

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; an error before `start`."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    def log_tail(self) -> str:
        """The end of its output."""
        return self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log_path.exists() else ""

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll ``ready``.

        Raises:
            RuntimeError: the process ended or the time is over; the message has the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.running or time.monotonic() > deadline:
                reason = "is not ready in time" if self.running else "ended before it was ready"
                raise RuntimeError(f"{self.name} {reason}: {' '.join(self.argv)}\n{self.log_tail()}")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, wait, SIGKILL. Returns the exit code; 0 if it never ran."""
        if self.process is None:
            return 0
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """SIGKILL and wait."""
        if self.process is None:
            return 0
        self.signal(signal.SIGKILL)
        return self.process.wait()
