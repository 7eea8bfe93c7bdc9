"""Which cached slot to give up when a tier is full. Pure policies behind one protocol.

A policy sees every *cached* slot: published, filled, leased by nobody. It never decides whether to evict, only the
order. Leaves of the prefix tree go first: a slot with resident published children is passed over, so a root outlives
its tail, and a run that begins at the root stays usable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvtier_worker.core.ids import BlockHash

IsLeaf = Callable[[int], bool]
"""Whether a slot has no resident published child."""


class EvictionPolicy(Protocol):
    """Order of eviction among the cached slots of one pool."""

    def insert(self, slot: int, block_hash: BlockHash) -> None:
        """``slot`` became cached. Called with the deepest block of a prefix first, so roots are newest."""

    def remove(self, slot: int) -> None:
        """``slot`` is no longer cached: leased again, or dropped. It is present."""

    def expose(self, slot: int) -> None:
        """``slot`` lost its last resident child: it is a leaf now. It is present."""

    def hit(self, block_hash: BlockHash) -> None:
        """A request matched this published block."""

    def evict(self, is_leaf: IsLeaf) -> int:
        """Remove and return the slot to give up: a leaf if there is one. Raises IndexError when nothing is cached."""

    def __len__(self) -> int:
        """Number of cached slots."""


class LeafQueue:
    """Slots in order of insertion, of which only leaves come out.

    A slot that reaches the old end while it has children is parked; when it is exposed it returns to the old end,
    where it would be. Every slot is parked at most once per insertion or exposure, so all operations are O(1)
    amortised.
    """

    __slots__ = ("_order", "_parked")

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[int, None] = OrderedDict()

    def push(self, slot: int) -> None:
        """Add ``slot`` as the newest."""
        self._order[slot] = None

    def discard(self, slot: int) -> None:
        """Remove ``slot``. Raises KeyError if it is not here."""
        if slot in self._parked:
            del self._parked[slot]
        else:
            del self._order[slot]

    def expose(self, slot: int) -> None:
        """``slot`` is a leaf now."""
        if slot in self._parked:
            del self._parked[slot]
            self._order[slot] = None
            self._order.move_to_end(slot, last=False)

    def oldest_leaf(self, is_leaf: IsLeaf) -> int | None:
        """The oldest leaf, still in the queue; None when there is none."""
        while self._order:
            slot = next(iter(self._order))
            if is_leaf(slot):
                return slot
            del self._order[slot]
            self._parked[slot] = None
        return None

    def oldest(self) -> int:
        """The oldest slot of a queue without leaves. Raises IndexError when empty."""
        for slot in self._parked or self._order:
            return slot
        raise IndexError

    def __contains__(self, slot: int) -> bool:
        return slot in self._order or slot in self._parked

    def __len__(self) -> int:
        return len(self._order) + len(self._parked)


class LRU:
    """Least recently used leaf first: the order of the last release."""

    def __init__(self) -> None:
        self._queue = LeafQueue()

    def insert(self, slot: int, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.insert`."""
        del block_hash
        self._queue.push(slot)

    def remove(self, slot: int) -> None:
        """See `EvictionPolicy.remove`."""
        self._queue.discard(slot)

    def expose(self, slot: int) -> None:
        """See `EvictionPolicy.expose`."""
        self._queue.expose(slot)

    def hit(self, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.hit`: recency follows from the release after the hit."""

    def evict(self, is_leaf: IsLeaf) -> int:
        """See `EvictionPolicy.evict`."""
        slot = self._queue.oldest_leaf(is_leaf)
        if slot is None:
            slot = self._queue.oldest()
        self._queue.discard(slot)
        return slot

    def __len__(self) -> int:
        return len(self._queue)
