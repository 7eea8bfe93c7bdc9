"""One worker process as its engine sees it: started, watched, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from kvtier_worker.engine.worker_start import WorkerStart, encode_start


class WorkerProcess:
    """A child that gets its start record on standard input and whose end is visible through a file descriptor.

    It runs in a session of its own, so that Ctrl-C reaches the engine only, which then ends its workers in order. Its
    output goes where the engine's goes.
    """

    def __init__(self, command: Sequence[str], start: WorkerStart, env: Mapping[str, str]) -> None:
        self.rank = start.rank
        self._process = subprocess.Popen(
            [*command], stdin=subprocess.PIPE, env=dict(env), start_new_session=True, bufsize=0
        )
        self.death_fd = os.pidfd_open(self._process.pid)
        stdin = self._process.stdin
        assert stdin is not None
        self._stdin = stdin
        try:
            stdin.write(encode_start(start))
        except BrokenPipeError:
            return  # it died at once; whoever polls will see that

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def how_it_ended(self) -> str:
        """``exit status 3`` or ``signal SIGKILL``; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"signal {signal.Signals(-status).name}"
        return f"exit status {status}"

    def end(self, deadline: float) -> None:
        """Wait until ``deadline`` (monotonic seconds), then terminate, then kill. Afterwards nothing is left."""
        for push in (None, self._process.terminate, self._process.kill):
            if push is not None:
                push()
                deadline = time.monotonic() + 1.0
            try:
                self._process.wait(max(deadline - time.monotonic(), 0.0))
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        self._stdin.close()
        os.close(self.death_fd)
