"""Keys that the master lists but nobody can read, for example after their storage node died.

Without it every probe would find them and every read would pay the timeout again, until the master notices. Pure;
not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class AbsentKeys:
    """A bounded set of keys with a time to live. Empty, it costs nothing."""

    def __init__(self, ttl_s: float, capacity: int = 65536) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._until: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Iterable[str], now: float) -> None:
        """Take these as absent until ``now`` + TTL. The oldest leave when there are too many."""
        for key in keys:
            self._until.pop(key, None)
            self._until[key] = now + self._ttl_s
        while len(self._until) > self._capacity:
            del self._until[next(iter(self._until))]

    def discard(self, key: str) -> None:
        """It is there again."""
        self._until.pop(key, None)

    def among(self, keys: Sequence[str], now: float) -> frozenset[str]:
        """Which of ``keys`` are taken as absent at ``now``."""
        self._expire(now)
        return frozenset(key for key in keys if key in self._until) if self._until else frozenset()

    def _expire(self, now: float) -> None:
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
