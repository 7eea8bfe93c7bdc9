"""How long cached blocks wait until they are used again, and what keeping one is therefore worth. Pure counting.

A life table follows cohorts, as an actuary does: of the blocks that reached an age, how many were used again at that
age? Blocks that are still waiting count as long as they have waited and no longer, so a young table is unbiased.
Ages are in *spans*, a fixed number of released blocks each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

FADE = 0.995
"""Weight that a count keeps per span, so that old habits are forgotten: half is gone after 138 spans."""

PRIOR_WEIGHT = 16.0
"""Observations that the prior is worth, against noise where few blocks reach an age."""


class LifeTable:
    """Reuse by age of one kind of blocks.

    Args:
        num_spans: ages from 0 to ``num_spans`` - 1 are followed.

    Attributes:
        reached: by age: blocks that came to be that old, faded.
        reused: by age: blocks that were used again then, faded.
    """

    __slots__ = ("_num_spans", "_waiting", "reached", "reused")

    def __init__(self, num_spans: int) -> None:
        self._num_spans = num_spans
        self._waiting = deque([0], maxlen=num_spans)  # by age: blocks not used again so far
        self.reached = [0.0] * num_spans
        self.reused = [0.0] * num_spans

    def enter(self) -> None:
        """A block begins to wait."""
        self._waiting[0] += 1
        self.reached[0] += 1

    def leave(self, age: int, *, reused: bool) -> None:
        """A block that began to wait ``age`` spans ago is used again, or is no longer followed."""
        if age < self._num_spans:
            self._waiting[age] -= 1
            self.reused[age] += reused

    def advance(self) -> None:
        """A span ends: everybody who waits is one span older."""
        self._waiting.appendleft(0)
        self.reused = [count * FADE for count in self.reused]
        self.reached = [count * FADE for count in self.reached]
        for age, waiting in enumerate(self._waiting):
            self.reached[age] += waiting

    def hazards(self, prior: Sequence[float]) -> list[float]:
        """By age: the chance that a block which reached it is used again at it, drawn towards ``prior``."""
        counts = zip(self.reused, self.reached, prior, strict=True)
        return [min((used + PRIOR_WEIGHT * p) / (reached + PRIOR_WEIGHT), 1.0) for used, reached, p in counts]


def pooled_hazards(tables: Sequence[LifeTable]) -> list[float]:
    """By age: hazards over all tables together; an age that few reached is taken to be like the one before."""
    used = [sum(column) for column in zip(*(table.reused for table in tables), strict=True)]
    reached = [sum(column) for column in zip(*(table.reached for table in tables), strict=True)]
    hazard = sum(used) / max(sum(reached), 1.0)
    pooled = []
    for count, total in zip(used, reached, strict=True):
        hazard = min((count + PRIOR_WEIGHT * hazard) / (total + PRIOR_WEIGHT), 1.0)
        pooled.append(hazard)
    return pooled


def worths(hazards: Sequence[float]) -> list[float]:
    """By age: expected hits per span of occupied slot of a block that age, if it is kept for the best time from now.

    With reuse F(t) and occupancy W(t), the integral of 1 - F, by age t, that is ``max over t > a of
    (F(t) - F(a)) / (W(t) - W(a))``: the steepest chord of the curve (W, F) from a. One pass from the right keeps the
    upper convex hull of the points seen; its first edge is the steepest chord.
    """
    reuse, occupancy, alive = [0.0], [0.0], 1.0
    for hazard in hazards:
        occupancy.append(occupancy[-1] + max(alive, 1e-9))
        alive *= 1.0 - hazard
        reuse.append(1.0 - alive)

    def steepness(start: int, stop: int) -> float:
        return (reuse[stop] - reuse[start]) / (occupancy[stop] - occupancy[start])

    hull = [len(hazards)]
    result = [0.0] * len(hazards)
    for age in reversed(range(len(hazards))):
        while len(hull) > 1 and steepness(age, hull[-1]) <= steepness(age, hull[-2]):
            hull.pop()
        result[age] = steepness(age, hull[-1])
        hull.append(age)
    return result
