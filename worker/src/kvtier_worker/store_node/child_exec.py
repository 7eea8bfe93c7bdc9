"""Become another program that ends when the parent does and leaves no core file: ``python -m … PROGRAM ARGS``.

The process id stays. A storage node that is killed must not leave a mooncake_client behind.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process. The parent's pid comes first, so that a parent that died meanwhile is noticed."""
    parent, *argv = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit(1)
    os.execvp(argv[0], argv)  # noqa: S606 - the program is the caller's choice


if __name__ == "__main__":
    main()
