"""Which cached slot to give up when a tier is full. Pure policies behind one protocol.

A policy sees every *cached* slot: published, filled, leased by nobody. It never decides whether to evict, only the
order. Leaves of the prefix tree go first: a slot with resident published children is passed over, so a root outlives
its tail, and a run that begins at the root stays usable.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier_worker.core.ids import BlockHash
from kvtier_worker.core.lifetables import LifeTable, pooled_hazards, worths

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
    """Slots in order of insertion, of which the oldest leaf comes out.

    A slot that reaches the old end while it has children is parked; when it is exposed it returns to its place among
    the exposed, all of which are older than what was never parked. A slot is parked at most once per insertion or
    exposure, so everything takes constant time, amortised, but for the heap of the exposed and for `oldest`.
    """

    __slots__ = ("_exposed", "_heap", "_num_pushed", "_order", "_parked")

    def __init__(self) -> None:
        self._num_pushed = 0
        # Each slot is in one of these three, with its place in the order.
        self._order: OrderedDict[int, int] = OrderedDict()
        self._parked: dict[int, int] = {}
        self._exposed: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []  # (place, slot) of the exposed, and some that no longer are

    def push(self, slot: int) -> None:
        """Add ``slot`` as the newest."""
        self._num_pushed += 1
        self._order[slot] = self._num_pushed

    def discard(self, slot: int) -> None:
        """Remove ``slot``. Raises KeyError if it is not here."""
        for places in (self._order, self._parked):
            if slot in places:
                del places[slot]
                return
        del self._exposed[slot]

    def expose(self, slot: int) -> None:
        """``slot`` is a leaf now."""
        place = self._parked.pop(slot, None)
        if place is not None:
            self._exposed[slot] = place
            heapq.heappush(self._heap, (place, slot))

    def oldest_leaf(self, is_leaf: IsLeaf) -> int | None:
        """The oldest leaf, still in the queue; None when there is none."""
        while self._heap:
            place, slot = self._heap[0]
            if self._exposed.get(slot) == place:
                if is_leaf(slot):
                    return slot
                self._parked[slot] = self._exposed.pop(slot)
            heapq.heappop(self._heap)
        while self._order:
            slot, place = next(iter(self._order.items()))
            if is_leaf(slot):
                return slot
            del self._order[slot]
            self._parked[slot] = place
        return None

    def oldest(self) -> int:
        """The oldest slot after `oldest_leaf` found none: the deepest of the least recent release.

        Looks at every slot. Rare: somebody holds tails without their roots, as private copies of these. Raises
        IndexError when the queue is empty.
        """
        if not self._parked:
            raise IndexError
        return min(self._parked, key=self._parked.__getitem__)

    def __len__(self) -> int:
        return len(self._order) + len(self._parked) + len(self._exposed)


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


@dataclass(slots=True)
class _Record:
    """What S3FIFO remembers of a hash.

    Attributes:
        again: it was used more than once.
        since: clock of its last release.
        waiting: it is counted as waiting in the life table of its queue.
        ghost: it was evicted since.
    """

    again: bool
    since: int
    waiting: bool = False
    ghost: bool = False


class S3FIFO:
    """Scan-resistant: a probationary queue, a main queue and a ghost, like S3-FIFO, with shares that adapt.

    A block used once waits in probation, one used again in main, both in order of release; a ghost remembers hashes
    after eviction, so a block that comes back goes to main. S3-FIFO gives probation a fixed tenth of the capacity,
    which loses to LRU where the cache is large enough to see most blocks again. Here each queue keeps a life table,
    and the eviction takes the older end that is worth less to keep (`lifetables.worths`). A scan is never used again,
    so probation drains first; where single use is often followed by a second, its blocks outlive stale main ones.

    Until three capacities of blocks went by, the tables know no whole life, and the order is leaf-first LRU. The
    constants were chosen on the two traces of ``bench/trace_replay.py``. A uniform loop larger than the cache still
    defeats it, as it does LRU: only old ends are candidates.

    Args:
        capacity: slots of the pool.
    """

    SPANS = 64
    SPANS_PER_CAPACITY = 8
    MIN_SPAN = 256
    WARM_UP = 3
    MAX_GHOSTS = 250_000

    def __init__(self, capacity: int) -> None:
        self._span = max(capacity // self.SPANS_PER_CAPACITY, self.MIN_SPAN)
        self._warm_at = self.WARM_UP * capacity
        self._max_records = min(self.SPANS * self._span, capacity + self.MAX_GHOSTS)
        self._queues = (LeafQueue(), LeafQueue())  # probation, main
        self._tables = (LifeTable(self.SPANS), LifeTable(self.SPANS))
        self._worths = ([0.0] * self.SPANS, [0.0] * self.SPANS)
        self._records: OrderedDict[BlockHash, _Record] = OrderedDict()  # oldest release first
        self._cached: dict[int, tuple[BlockHash, bool, int]] = {}  # slot: hash, in main, clock
        self._clock = 0  # blocks released so far

    def insert(self, slot: int, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.insert`."""
        self._tick()
        record = self._records.get(block_hash)
        if record is None:
            record = self._remember(block_hash, again=False)
        else:
            self._stop_waiting(record, reused=record.ghost)
            self._records.move_to_end(block_hash)
        record.since, record.waiting, record.ghost = self._clock, True, False
        self._tables[record.again].enter()
        self._queues[record.again].push(slot)
        self._cached[slot] = (block_hash, record.again, self._clock)

    def remove(self, slot: int) -> None:
        """See `EvictionPolicy.remove`."""
        _, in_main, _ = self._cached.pop(slot)
        self._queues[in_main].discard(slot)

    def expose(self, slot: int) -> None:
        """See `EvictionPolicy.expose`."""
        _, in_main, _ = self._cached[slot]
        self._queues[in_main].expose(slot)

    def hit(self, block_hash: BlockHash) -> None:
        """See `EvictionPolicy.hit`."""
        record = self._records.get(block_hash)
        if record is None:  # shared before its first release, or forgotten
            self._remember(block_hash, again=True)
        else:
            self._stop_waiting(record, reused=True)

    def evict(self, is_leaf: IsLeaf) -> int:
        """See `EvictionPolicy.evict`."""
        if not self._cached:
            raise IndexError
        leaves = [slot for queue in self._queues if (slot := queue.oldest_leaf(is_leaf)) is not None]
        if leaves:
            slot = min(leaves, key=self._priority)
        else:
            slot = min((queue.oldest() for queue in self._queues if len(queue)), key=self._released_at)
        block_hash, _, _ = self._cached[slot]
        self.remove(slot)
        record = self._records.get(block_hash)
        if record is not None:
            record.ghost = True
        return slot

    def __len__(self) -> int:
        return len(self._cached)

    def _tick(self) -> None:
        self._clock += 1
        if self._clock % self._span:
            return
        for table in self._tables:
            table.advance()
        if self._clock >= self._warm_at:
            prior = pooled_hazards(self._tables)
            probation, main = (worths(table.hazards(prior)) for table in self._tables)
            self._worths = (probation, main)

    def _remember(self, block_hash: BlockHash, *, again: bool) -> _Record:
        record = self._records[block_hash] = _Record(again, self._clock)
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)
        return record

    def _spans_since(self, clock: int) -> int:
        return self._clock // self._span - clock // self._span

    def _stop_waiting(self, record: _Record, *, reused: bool) -> None:
        if record.waiting:
            self._tables[record.again].leave(self._spans_since(record.since), reused=reused)
            record.waiting = False
        record.again |= reused

    def _priority(self, slot: int) -> tuple[float, int]:
        _, in_main, clock = self._cached[slot]
        age = self._spans_since(clock)
        return (self._worths[in_main][age] if age < self.SPANS else 0.0), clock

    def _released_at(self, slot: int) -> int:
        return self._cached[slot][2]


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LRU(),  # noqa: ARG005
    "s3fifo": S3FIFO,
}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy called ``name``, one of `POLICIES`, for a pool of ``capacity`` usable slots.

    Raises:
        ValueError: no such policy.
    """
    try:
        return POLICIES[name](capacity)
    except KeyError:
        msg = f"eviction policy {name!r} is not one of {', '.join(sorted(POLICIES))}"
        raise ValueError(msg) from None
