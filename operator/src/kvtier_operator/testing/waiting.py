"""Waits for what a control plane does in its own time: for the condition, never for the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0
"""The garbage collector hears of a new definition half a minute late."""
_POLL_S = 0.1

_Answer = TypeVar("_Answer")


def wait_for(what: str, done: Callable[[], _Answer | None], patience_s: float = PATIENCE_S) -> _Answer:
    """The first true answer.

    Args:
        what: is waited for, in words.
        done: asks.
        patience_s: after which nobody should have to wait any more.

    Raises:
        AssertionError: there was none in time.
    """
    deadline = time.monotonic() + patience_s
    while not (answer := done()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(_POLL_S)
    return answer
