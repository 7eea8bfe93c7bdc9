"""When a cluster is looked at again without any news of it. Pure: chance is given.

A pass that acted is followed by another at once, which sees what came of it; when pass after pass acts, somebody undoes
what we do, and they become rarer. A plan that waits asks to be called again; when nothing came of that several times,
the calls become rarer too, since news wakes the cluster anyway and a thousand may be waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from kvtier_operator.controller.work_queue import Chance, Key

RESYNC_S = 300.0
AGAIN_S = 0.02
PATIENCE = 8
"""So many acting passes in a row are a roll, whose steps the plan times itself; more are a quarrel."""
LONGEST_AGAIN_S = 60.0
LONGEST_WAIT_S = 30.0


@dataclass(slots=True)
class Pace(Generic[Key]):
    """Passes in a row that acted, and that waited for nothing.

    Attributes:
        chance: source of jitter.
    """

    chance: Chance
    _acted: dict[Key, int] = field(default_factory=dict)
    _waited: dict[Key, int] = field(default_factory=dict)

    def next_s(self, key: Key, *, acted: bool, news: bool, asked_s: float) -> float:
        """Seconds until the next pass.

        Args:
            key: of the cluster.
            acted: the pass changed something of it.
            news: the pass changed its status.
            asked_s: what the plan asked for; 0 = nothing.
        """
        if acted:
            self._waited.pop(key, None)
            streak = self._acted[key] = self._acted.get(key, 0) + 1
            again_s = min(LONGEST_AGAIN_S, AGAIN_S * 2.0 ** min(streak - 1, 16))
            return min(again_s, asked_s or again_s) if streak < PATIENCE else again_s
        self._acted.pop(key, None)
        if news or not asked_s:
            self._waited.pop(key, None)
            return asked_s or self.resync_s()
        times = self._waited.get(key, 0)
        self._waited[key] = times + 1
        return max(asked_s, min(LONGEST_WAIT_S, asked_s * 2.0 ** min(times, 8)))

    def resync_s(self) -> float:
        """Until the regular look at every cluster, 10 % more or less, so that they do not all come at once."""
        return RESYNC_S * (0.9 + 0.2 * self.chance.random())

    def forget(self, key: Key) -> None:
        """The cluster is gone."""
        self._acted.pop(key, None)
        self._waited.pop(key, None)
