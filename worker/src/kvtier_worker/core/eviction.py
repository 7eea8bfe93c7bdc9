"""Which cached slot to give up when a tier is full. Pure policies behind one protocol.

A policy sees only *evictable* slots: published, filled, leased by nobody. It never decides whether to evict, only the
order. The pool offers leaves of the prefix tree only: a slot with resident published children is withheld, so a root
is never evicted before its tail.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvtier_worker.core.ids import BlockHash


class EvictionPolicy(Protocol):
    """Order of eviction among the evictable slots of one pool."""

    def insert(self, slot: int, block_hash: BlockHash) -> None:
        """``slot`` became evictable. Called with the deepest block of a prefix first, so roots are newest."""

    def remove(self, slot: int) -> None:
        """``slot`` is no longer evictable: leased again, withheld, or dropped. It is present."""

    def hit(self, block_hash: BlockHash) -> None:
        """A request matched this published block."""

    def victim(self) -> int:
        """The slot to evict next; not removed yet. Raises IndexError when there is none."""

    def __len__(self) -> int:
        """Number of evictable slots."""


class LRU:
    """Least recently used first: the order of the last release."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.insert`."""
        del block_hash
        self._order[slot] = None

    def remove(self, slot: int) -> None:
        """See `EvictionPolicy.remove`."""
        del self._order[slot]

    def hit(self, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.hit`: recency follows from the release after the hit."""

    def victim(self) -> int:
        """See `EvictionPolicy.victim`."""
        try:
            return next(iter(self._order))
        except StopIteration:
            raise IndexError from None

    def __len__(self) -> int:
        return len(self._order)
