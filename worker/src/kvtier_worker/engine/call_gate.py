"""Lets calls in until it is closed, and closes only when nobody is inside: what a call may touch outlives the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CallGate:
    """Lets calls in until it is closed; closing waits for those inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self.closed = False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Whether the call may go on; it counts as inside until the block ends."""
        with self._changed:
            accepted = not self.closed
            self._inside += accepted
        try:
            yield accepted
        finally:
            with self._changed:
                self._inside -= accepted
                self._changed.notify_all()

    def close(self) -> bool:
        """Refuse new calls and wait for those inside; False = somebody closed it before."""
        with self._changed:
            if self.closed:
                return False
            self.closed = True
            self._changed.wait_for(lambda: not self._inside)
            return True
