"""Divides the engines of all roles into units that are replaced together, and says what the next step may change. Pure.

A unit is the smallest set of pods that serves requests by itself: one pod of a Fused role, or prefill and decode in
their ratio. With split roles there are as many units as the smallest role has pods; after k of K units a role with n
pods has ``n * k // K`` of them in the new revision, so that a revision that has a unit has both roles, as near to their
ratio as whole pods allow.

    max_surge 0    old units = K - (ready + 1)    new units = ready + 1        never fewer than K - 1 in all
    max_surge s    old units = K - ready          new units = ready + s        never fewer than K in all

Only ready units of the new revision let the next ones leave, so a revision that does not start costs one unit at most.
The step follows from the counts alone: whatever was interrupted is completed by the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Counts = Mapping[str, int]
"""Pods by role."""


@dataclass(frozen=True, slots=True)
class Units:
    """How the wanted pods divide.

    Attributes:
        wanted: pods by role.
        paired: the roles serve requests only together.
    """

    wanted: Counts
    paired: bool

    @property
    def total(self) -> int:
        """Number of units; zero when no pod is wanted."""
        sizes = [size for size in self.wanted.values() if size]
        if not sizes:
            return 0
        return min(sizes) if self.paired else max(sizes)

    def at(self, role: str, units: int) -> int:
        """Pods of a role in the first so many units."""
        size = self.wanted.get(role, 0)
        if not self.paired:
            return min(units, size)
        return size * units // self.total if self.total else 0

    def complete(self, pods: Counts) -> int:
        """Whole units in these pods."""
        return next(
            (k for k in range(self.total, 0, -1) if all(pods.get(role, 0) >= self.at(role, k) for role in self.wanted)),
            0,
        )

    def enough(self, pods: Counts, max_surge: int) -> bool:
        """True when so many pods are as many as a rollout promises to leave."""
        full = self.total if max_surge else self.total - 1
        return all(pods.get(role, 0) >= self.at(role, full) for role in self.wanted)


@dataclass(frozen=True, slots=True)
class Step:
    """Pods that each revision should have next."""

    new: Counts
    old: Counts


def next_step(units: Units, *, new: Counts, ready: Counts, old: Counts, max_surge: int) -> Step:
    """How many pods the new and the old revision may have now.

    Args:
        units: of the wanted pods.
        new: pods that the new revision has been given.
        ready: those of them that are ready.
        old: pods that the old revision still has been given; it never gets more.
        max_surge: units beyond the wanted ones that may exist meanwhile.
    """
    done = units.complete(ready)
    target = min(units.total, done + max(1, max_surge))
    leaving = done if max_surge else min(units.total, done + 1)
    return Step(
        new={role: min(size, max(new.get(role, 0), units.at(role, target))) for role, size in units.wanted.items()},
        old={role: min(count, _stays(units, role, leaving)) for role, count in old.items()},
    )


def _stays(units: Units, role: str, leaving: int) -> int:
    """Pods of the old revision beside so many units of the new one."""
    size = units.wanted.get(role, 0)
    # A role that the spec dropped serves until the others have taken over, one pod for each unit yet to come.
    return size - units.at(role, leaving) if size else units.total - leaving
