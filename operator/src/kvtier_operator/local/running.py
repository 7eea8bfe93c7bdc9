"""One process of a cluster on this machine: started as a child that ends with us, and ended with all that it started.

It leads a session and process group of its own, so that a Ctrl-C at the terminal does not reach it, and what it leaves
in its group is killed with it. IO; used by the supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kvtier_operator.local import child
from kvtier_operator.resources.processes import ProcessSpec


class RunningProcess:
    """A process that was started. It stays known to the kernel until `reap`, whenever it ends.

    Args:
        spec: what to run.
        log_path: gets everything that it writes, after what stands there.

    Raises:
        OSError: the machine has no room for another process.
    """

    def __init__(self, spec: ProcessSpec, log_path: Path) -> None:
        with _open_log(log_path) as log:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *spec.argv),
                env=os.environ | spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True when it ended. Leaves it to be reaped, so that its group's number stays taken."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def how_it_ended(self) -> str:
        """In words; it has ended."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None, "waitid without WNOHANG waits"
        if end.si_code == os.CLD_EXITED:
            return f"ended with exit status {end.si_status}"
        return f"was killed by {signal.Signals(end.si_status).name}"

    def terminate(self) -> None:
        """SIGTERM to the process alone: it ends its own children."""
        self._process.terminate()

    def reap(self) -> None:
        """SIGKILL whatever is left of it and its group, and let the kernel forget it. For the last call."""
        # A group vanishes only with its last member; its leader, ended or not, is not reaped yet.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


def _open_log(path: Path) -> BinaryIO:
    """The file, in its folder again if somebody removed that; without a log a process runs all the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")
