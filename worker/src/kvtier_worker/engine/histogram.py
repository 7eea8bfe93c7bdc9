"""A histogram that costs one bisection per observation, for numbers that arrive once per token.

prometheus_client's own takes a lock and walks labels for each one, which at 256 running sequences is a noticeable part
of a step. One thread observes; a scrape from another reads numbers that may be one observation apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts of observations by bucket.

    Args:
        name: of the metric.
        text: its help.
        bounds: upper bounds, ascending; an infinite one is added.
    """

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family for a scrape."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
