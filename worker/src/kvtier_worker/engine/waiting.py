"""Requests that are ready but not running: in order, or parked behind a request whose blocks they want to share."""

from __future__ import annotations

from bisect import insort

from kvtier_worker.core.ids import RequestId
from kvtier_worker.engine.requests import LiveRequest


def rank_key(live: LiveRequest) -> tuple[int, int]:
    """Who comes first: by priority if that counts, then by arrival. A preempted request keeps its place."""
    return live.rank_key


class WaitingQueue:
    """Ready requests in rank order. A parked one returns when its owner makes progress or ends."""

    def __init__(self) -> None:
        self._ready: list[LiveRequest] = []
        self._parked: dict[RequestId, list[LiveRequest]] = {}
        self._num_parked = 0

    def add(self, live: LiveRequest) -> None:
        """Queue ``live`` at its place."""
        insort(self._ready, live, key=rank_key)

    def first(self) -> LiveRequest | None:
        """The next to run; None when nobody is ready."""
        return self._ready[0] if self._ready else None

    def pop_first(self) -> LiveRequest:
        """Take the next to run out."""
        return self._ready.pop(0)

    def park(self, live: LiveRequest, owner: RequestId) -> None:
        """Set ``live``, which is in no queue, aside until `unpark` of ``owner``."""
        self._parked.setdefault(owner, []).append(live)
        self._num_parked += 1

    def unpark(self, owner: RequestId) -> None:
        """``owner`` made progress or ended: whoever waits for it is ready again."""
        for live in self._parked.pop(owner, ()):
            self._num_parked -= 1
            self.add(live)

    def remove(self, live: LiveRequest) -> None:
        """Take ``live`` out, wherever it is."""
        if live in self._ready:
            self._ready.remove(live)
            return
        for owner, parked in self._parked.items():
            if live in parked:
                parked.remove(live)
                self._num_parked -= 1
                if not parked:
                    del self._parked[owner]
                return

    def __len__(self) -> int:
        return len(self._ready) + self._num_parked
