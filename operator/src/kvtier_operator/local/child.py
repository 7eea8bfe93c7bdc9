"""Becomes another program that ends with its parent: ``python -S child.py PARENT_PID PROGRAM ARGUMENTS…``.

The supervisor starts every process through this file, as a script and without site packages, so that it costs some
milliseconds only. The kernel then sends SIGTERM to the process when its parent dies, even by SIGKILL. Doing it here and
not between fork and exec of the supervisor keeps that safe beside the supervisor's threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie our life to the parent's and become the program."""
    parent, command = int(argv[0]), argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the supervisor is gone")  # it died before we were tied to it
    try:
        os.execvp(command[0], command)  # noqa: S606 - a shell would stand between us and the signals
    except OSError as error:
        raise SystemExit(f"cannot run {command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
