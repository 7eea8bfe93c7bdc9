"""Which memory a store may touch: registered address ranges, without overlap. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from kvtier_worker.errors import StoreUnavailable

_ADDRESS_SPACE = 1 << 64


class MemoryRanges:
    """Half-open ranges ``[address, address + nbytes)``.

    Readers need no lock: every change replaces the table as a whole. Writers must exclude each other.
    """

    def __init__(self) -> None:
        self._table: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(address, nbytes) of each, ascending."""
        return iter([(start, stop - start) for start, stop in zip(*self._table, strict=True)])

    def admits(self, address: int, nbytes: int) -> bool:
        """Whether this range is new; False when exactly it is there already.

        Raises:
            StoreUnavailable: null, empty, beyond the address space, or overlapping another one.
        """
        stop = address + nbytes
        if address <= 0 or nbytes <= 0 or stop > _ADDRESS_SPACE:
            raise StoreUnavailable(f"cannot register {nbytes} bytes at {address:#x}: not a range of memory")
        for start, size in self:
            if (start, size) == (address, nbytes):
                return False
            if address < start + size and start < stop:
                raise StoreUnavailable(
                    f"cannot register [{address:#x}, {stop:#x}): it overlaps [{start:#x}, {start + size:#x})"
                )
        return True

    def add(self, address: int, nbytes: int) -> None:
        """Add a range that `admits` called new."""
        ranges = sorted([*self, (address, nbytes)])
        self._table = tuple(start for start, _ in ranges), tuple(start + size for start, size in ranges)

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether ``[address, address + nbytes)`` lies inside one registered range."""
        starts, stops = self._table
        place = bisect_right(starts, address) - 1
        return place >= 0 and nbytes >= 0 and address + nbytes <= stops[place]

    def clear(self) -> None:
        """Forget all."""
        self._table = ((), ())
