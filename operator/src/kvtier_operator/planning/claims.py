"""Which ports are taken, and where the next gap is. Mutable, made for one call of `allocation` and dropped after it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from kvtier_operator.planning.ports import PortBlock

_Owner = TypeVar("_Owner")

_END = 1 << 20
"""Beyond every port. Looking for gaps behind the range too tells by how much the range is too small."""


class Claims(Generic[_Owner]):
    """Disjoint blocks and their owners.

    Args:
        claims: pairs of block and owner; no two blocks meet.
    """

    def __init__(self, claims: Iterable[tuple[PortBlock, _Owner]] = ()) -> None:
        self._owners = dict(claims)
        self._sorted = sorted((block.start, block.stop) for block in self._owners)

    def holder(self, block: PortBlock) -> tuple[PortBlock, _Owner] | None:
        """A claim that meets the block, if there is one."""
        index = bisect_left(self._sorted, (block.stop, 0))
        if not index:
            return None
        before = PortBlock(*self._sorted[index - 1])
        return (before, self._owners[before]) if before.meets(block) else None

    def add(self, block: PortBlock, owner: _Owner) -> None:
        """Claim a block that nobody holds."""
        assert self.holder(block) is None, f"ports {block} are taken"
        self._owners[block] = owner
        insort(self._sorted, (block.start, block.stop))

    def gaps(self, start: int) -> Iterator[PortBlock]:
        """Runs of free ports from ``start`` on, lowest first; the last one has no end that matters."""
        for claimed_start, claimed_stop in self._sorted:
            if claimed_start > start:
                yield PortBlock(start, claimed_start)
            start = max(start, claimed_stop)
        yield PortBlock(start, _END)


class FirstFit:
    """Gives blocks from the lowest gap that is wide enough. Claims added later are unknown to it."""

    def __init__(self, gaps: Iterable[PortBlock]) -> None:
        self._gaps = list(gaps)

    def take(self, width: int) -> PortBlock:
        """The next block of this width; it may lie behind the range."""
        for index, gap in enumerate(self._gaps):
            if gap.width >= width:
                block = PortBlock(gap.start, gap.start + width)
                self._gaps[index] = PortBlock(block.stop, gap.stop)
                return block
        raise AssertionError("the last gap has no end")
