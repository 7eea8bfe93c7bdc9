"""When a process that ended by itself is started again, as the kubelet would, only sooner. Pure."""

from __future__ import annotations

from collections.abc import Sequence

DELAYS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each restart of a row; after the last one nothing will help any more."""
CALM_S = 60.0
"""A process that was ready for this long starts a new row."""


def failures_in_a_row(before: int, ready_s: float) -> int:
    """How often a process has failed without a calm while between, this time included.

    Args:
        before: failures of the row so far.
        ready_s: how long it was ready this time; 0 = it never was.
    """
    return 1 if ready_s >= CALM_S else before + 1


def restart_delay(failures: int, delays_s: Sequence[float] = DELAYS_S) -> float | None:
    """Seconds to wait after that many failures in a row; None = give up."""
    return delays_s[failures - 1] if failures <= len(delays_s) else None
