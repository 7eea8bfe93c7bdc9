"""One process from its first start until somebody stops it, over all its restarts. IO; used by the supervisor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvtier_operator.local.console import POLL_S, Say, StopRequest
from kvtier_operator.local.probes import waiting_for
from kvtier_operator.local.restarts import failures_in_a_row, restart_delay
from kvtier_operator.local.running import RunningProcess
from kvtier_operator.resources.processes import ProcessSpec

PROGRESS_EVERY_S = 5.0
PROGRESS_AT_CHANGE_S = 1.0


class Life:
    """A started process.

    Args:
        spec: what to run.
        log_path: gets everything that it writes.
        say: gets lines of progress.
        restart_delays_s: before each restart of a row.

    Attributes:
        restarts: how often it was started again because it had failed.
        failures: in a row.
    """

    def __init__(self, spec: ProcessSpec, log_path: Path, say: Say, restart_delays_s: Sequence[float]) -> None:
        self.restarts = 0
        self.failures = 0
        self._spec = spec
        self._log_path = log_path
        self._say = say
        self._restart_delays_s = restart_delays_s
        self._restart_at = 0.0
        self._running: RunningProcess | None = None
        self._ready_at: float | None = None
        self._since = self._said_at = 0.0
        self._missing = self._said = ""
        self._launch()

    @property
    def pid(self) -> int | None:
        """Its process id; None while it waits for a restart."""
        return self._running.pid if self._running else None

    @property
    def is_starting(self) -> bool:
        """It runs and was not ready yet."""
        return self._running is not None and self._ready_at is None

    @property
    def is_due(self) -> bool:
        """It waits for a restart and has waited enough."""
        return self._running is None and time.monotonic() >= self._restart_at

    def ending(self) -> str:
        """How it ended by itself; empty when it did not."""
        return self._running.how_it_ended() if self._running and self._running.has_ended else ""

    def becomes_ready(self) -> bool:
        """Ask it, and tell the user now and then what it is still doing."""
        self._missing = next(filter(None, map(waiting_for, self._spec.probes)), "")
        now = time.monotonic()
        if not self._missing:
            self._ready_at = now
            self._say(f"{self._spec.name}: ready after {now - self._since:.1f} s")
        elif now - self._said_at > (PROGRESS_EVERY_S if self._missing == self._said else PROGRESS_AT_CHANGE_S):
            self._say(f"{self._spec.name}: {self._missing} ({now - self._since:.0f} s)")
            self._said, self._said_at = self._missing, now
        return not self._missing

    def lateness(self) -> str:
        """That it had time enough to become ready; empty when it has more."""
        limit_s = self._spec.start_timeout_s
        late = self.is_starting and time.monotonic() - self._since > limit_s
        return f"was not ready after {limit_s:.0f} s: {self._missing}" if late else ""

    def fail(self) -> float | None:
        """End what is left of it and wait for a restart. Seconds until then; None = it failed too often."""
        now = time.monotonic()
        ready_s = now - self._ready_at if self._ready_at is not None else 0.0
        self.kill()
        self._ready_at = None
        self.failures = failures_in_a_row(self.failures, ready_s)
        delay_s = restart_delay(self.failures, self._restart_delays_s)
        if delay_s is None:
            return None
        delay_s = max(delay_s, self._spec.restart_pause_s)
        self._restart_at = now + delay_s
        return delay_s

    def restart(self) -> None:
        """Start it again.

        Raises:
            OSError: the machine has no room for another process.
        """
        self.restarts += 1
        self._launch()

    def stop(self, stop_request: StopRequest) -> None:
        """SIGTERM, then SIGKILL for whatever remains after its time or when the user insists."""
        running, timeout_s = self._running, self._spec.stop_timeout_s
        if running is None:
            return
        if not running.has_ended:
            self._say(f"{self._spec.name}: stopping")
            running.terminate()
        deadline = time.monotonic() + timeout_s
        while not running.has_ended and not stop_request.insisted:
            if time.monotonic() > deadline:
                self._say(f"{self._spec.name}: did not stop in {timeout_s:.0f} s, killed")
                break
            time.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL it and its group, as a crash does."""
        if self._running:
            self._running.reap()
        self._running = None

    def _launch(self) -> None:
        self._running = RunningProcess(self._spec, self._log_path)
        self._since = self._said_at = time.monotonic()
        self._ready_at = None
        self._missing = self._said = ""
