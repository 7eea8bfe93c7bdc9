"""What a user hears and wishes while a cluster runs on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.05

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
