"""What a user hears and wishes while a cluster runs on this machine."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TextIO

POLL_S = 0.05
_GONE = frozenset({errno.EPIPE, errno.EIO})
"""Whoever read is gone: the program behind a pipe, or a terminal that was closed."""

Handler = Callable[[int, FrameType | None], object] | int | None
"""Of a signal, as Python has them."""
Say = Callable[[str], None]
"""Takes one line of progress for the user."""


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once. Nobody may read any more, or the disk be full: the cluster matters more.

    Args:
        line: without its end.
        stream: where to; None = stdout.
    """
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError as error:
        if error.errno in _GONE:
            # What is left in the stream would make the end of the process fail.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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


def heed_signals(stop_request: StopRequest) -> dict[signal.Signals, Handler]:
    """Let Ctrl-C, SIGTERM and the end of the terminal ask to stop; the last one not under ``nohup``, which ignores it.

    Returns:
        The handlers that there were, by signal.
    """
    heeded = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heeded.append(signal.SIGHUP)
    return {number: signal.signal(number, lambda _number, _frame: stop_request.ask()) for number in heeded}
