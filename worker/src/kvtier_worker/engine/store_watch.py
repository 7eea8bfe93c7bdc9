"""Whether a prefetch is worth trying: the circuit breakers of the workers' stores as last reported.

Only a shortcut. An open breaker answers at once that it has nothing, so a stale view costs a round trip to the workers
and never a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvtier_worker.engine.messages import PrefetchDone, WorkerStats

RECHECK_S: Final = 2.0
"""How long an open breaker is believed before a prefetch may find out again."""

REFRESH_S: Final = 5.0
"""How old the workers' own counters may get while the engine is busy."""


@dataclass(slots=True)
class StoreWatch:
    """State of the store as the engine thread knows it.

    Args:
        enabled: whether there is a store at all.
    """

    enabled: bool
    _open_since: dict[int, float] = field(default_factory=dict)
    _asked_at: float | None = None
    _doubt: bool = True

    def usable(self, now: float) -> bool:
        """Whether to start prefetches at ``now``."""
        if not self.enabled:
            return False
        believed = [since for since in self._open_since.values() if now < since + RECHECK_S]
        if self._open_since and not believed:
            self._doubt = True
        return not believed

    def on_prefetch(self, message: PrefetchDone) -> None:
        """Store errors make the breaker's state worth asking for."""
        self._doubt = self._doubt or message.num_faults > 0

    def on_stats(self, message: WorkerStats, now: float) -> None:
        """A worker told its breaker's state."""
        if message.store_state == "open":
            self._open_since[message.rank] = now
        else:
            self._open_since.pop(message.rank, None)

    def should_ask(self, now: float) -> bool:
        """Whether to send a StatsRequest now; True counts as asked."""
        age = REFRESH_S if self._asked_at is None else now - self._asked_at
        if age >= REFRESH_S or (self._doubt and age >= RECHECK_S / 4):
            self._asked_at, self._doubt = now, False
            return True
        return False
