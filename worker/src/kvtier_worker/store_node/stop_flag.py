"""The wish to stop, set by a signal handler and waited for by the thread it interrupts.

A `threading.Event` has a lock: a handler that runs while its own thread holds it, inside `wait`, waits for ever. An
eventfd has none.
"""

from __future__ import annotations

import os
import select


class StopFlag:
    """Set once, never cleared; the descriptor lives as long as the object."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def set(self) -> None:
        """Ask to stop; any thread, any signal handler, any number of times."""
        os.eventfd_write(self._descriptor, 1)

    def is_set(self) -> bool:
        """Whether somebody asked."""
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until asked, for ``timeout_s`` at most; True when asked."""
        readable, _, _ = select.select([self._descriptor], [], [], max(timeout_s, 0.0))
        return bool(readable)
