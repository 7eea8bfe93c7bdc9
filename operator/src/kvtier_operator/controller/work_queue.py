"""Which cluster is looked at next: a queue that holds each key once. Pure: time and chance are arguments.

A key is *due* at some moment. `take` hands out a due key and keeps it back until `done` or `failed`, so that one key is
never worked on twice at once; whatever is added meanwhile is remembered for afterwards. The earliest due time wins.
Owned by the event loop of the controller, which sleeps until `next_due`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key")

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 60.0
_JITTER = 0.5
"""A backoff is between this part of its length and all of it, so that many failures do not come back together."""


class Chance(Protocol):
    """Where jitter comes from; `random.Random` is one."""

    def random(self) -> float:
        """A number in [0, 1)."""


@dataclass(slots=True)
class WorkQueue(Generic[Key]):
    """Keys and when they are due.

    Attributes:
        chance: source of jitter.
    """

    chance: Chance
    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _busy: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)
    _serial: int = 0

    def add(self, key: Key, at: float) -> None:
        """Make a key due at ``at`` unless it is earlier already."""
        known = self._due.get(key)
        if known is not None and known <= at:
            return
        self._due[key] = at
        if key not in self._busy:
            self._push(key, at)

    def take(self, now: float) -> Key | None:
        """The key that has been due for longest, or None. It is the caller's until `done` or `failed`."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy.add(key)
        return key

    def done(self, key: Key) -> None:
        """The key was worked on with success; what was added meanwhile counts from now on."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: Key, now: float, at_least_s: float = 0.0) -> float:
        """The key has to be tried again later; each time in a row waits longer.

        Args:
            key: that was taken.
            now: the time.
            at_least_s: what the server asked for.

        Returns:
            Seconds until it is due again by itself. An `add` can make that earlier, but not earlier than
            ``at_least_s``.
        """
        times = self._failures.get(key, 0)
        self._failures[key] = times + 1
        longest = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(times, 16))
        delay = max(at_least_s, longest * (_JITTER + (1 - _JITTER) * self.chance.random()))
        asked = self._due.pop(key, None)
        due = now + delay
        if asked is not None:
            due = min(due, max(asked, now + max(at_least_s, longest * _JITTER)))
        self._due[key] = due
        self._release(key)
        return due - now

    def forget(self, key: Key) -> None:
        """Drop what is known of a key that does not exist any more."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    def next_due(self) -> float | None:
        """When the next key becomes due; None = nothing waits."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def depth(self, now: float) -> int:
        """Keys that are due and wait for a worker."""
        return sum(due <= now and key not in self._busy for key, due in self._due.items())

    def oldest_age_s(self, now: float) -> float:
        """For how long the key that has waited longest is due."""
        due = self.next_due()
        return 0.0 if due is None else max(0.0, now - due)

    def _release(self, key: Key) -> None:
        self._busy.discard(key)
        if key in self._due:
            self._push(key, self._due[key])

    def _push(self, key: Key, at: float) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))

    def _drop_stale(self) -> None:
        while self._heap:
            at, _, key = self._heap[0]
            if key not in self._busy and self._due.get(key) == at:
                return
            heapq.heappop(self._heap)
