"""Store keys to be wary of for a while: those whose content was corrupt on arrival, those that could not be read.

A put heals a key; `release` is then called. Thread-safe. Bounded, oldest out first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable


class Quarantine:
    """A bounded set of keys with a time to live.

    Args:
        ttl_s: seconds a key stays.
        max_keys: keys kept; the oldest leaves for a new one.
        clock: monotonic seconds.
    """

    def __init__(self, ttl_s: float, max_keys: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        with self._lock:
            until = self._until.get(key)
            if until is None:
                return False
            if until > self._clock():
                return True
            del self._until[key]
            return False

    def __len__(self) -> int:
        with self._lock:
            return len(self._until)

    def add(self, key: str) -> None:
        """Keep ``key`` out from now on."""
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = self._clock() + self._ttl_s
            while len(self._until) > self._max_keys:
                self._until.popitem(last=False)

    def release(self, key: str) -> None:
        """``key`` was written anew."""
        with self._lock:
            self._until.pop(key, None)
