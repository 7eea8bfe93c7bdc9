"""Slots of one tier: who holds them, what they contain, which of them a lookup may find (N2).

One owner (the engine thread) calls it; no locks, no clock. A slot's life is a transition table and `_move` is the only
function that applies it:

    device  FREE -> LEASED   -> (RESTORING) -> FILLED -> CACHED -> FREE
    host    FREE -> RESERVED -> (FETCHING | OFFLOADING) -> FILLED -> CACHED -> FREE

A *lease* is one holder: a request that uses the slot, or a job that copies into or out of it. A slot with leases is
never evicted; a slot whose copy is in flight is leased by that copy's job, so it cannot be freed under it. *Published*
means a lookup by hash finds it. A device slot may be published while RESTORING (R1); it then carries the batch that
fills it, and `unpublish` takes it back if that batch aborts.

Invariant, proved by `check_integrity`: free + leased + cached == usable; slot 0 is padding and never appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier_worker.core.eviction import LRU, EvictionPolicy
from kvtier_worker.core.ids import BatchId, BlockHash, Tier
from kvtier_worker.errors import IntegrityError, PoolExhausted


class SlotState(StrEnum):
    """Where a slot is in its life."""

    FREE = "free"
    LEASED = "leased"
    RESERVED = "reserved"
    RESTORING = "restoring"
    FETCHING = "fetching"
    OFFLOADING = "offloading"
    FILLED = "filled"
    CACHED = "cached"


DEVICE_TRANSITIONS: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.FREE, SlotState.LEASED),
        (SlotState.LEASED, SlotState.RESTORING),
        (SlotState.LEASED, SlotState.FILLED),
        (SlotState.LEASED, SlotState.FREE),
        (SlotState.RESTORING, SlotState.FILLED),
        (SlotState.RESTORING, SlotState.FREE),
        (SlotState.FILLED, SlotState.CACHED),
        (SlotState.FILLED, SlotState.FREE),
        (SlotState.CACHED, SlotState.FILLED),
        (SlotState.CACHED, SlotState.FREE),
    }
)
HOST_TRANSITIONS: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.FREE, SlotState.RESERVED),
        (SlotState.RESERVED, SlotState.FETCHING),
        (SlotState.RESERVED, SlotState.OFFLOADING),
        (SlotState.RESERVED, SlotState.FREE),
        (SlotState.FETCHING, SlotState.FILLED),
        (SlotState.FETCHING, SlotState.FREE),
        (SlotState.OFFLOADING, SlotState.FILLED),
        (SlotState.OFFLOADING, SlotState.FREE),
        (SlotState.FILLED, SlotState.CACHED),
        (SlotState.FILLED, SlotState.FREE),
        (SlotState.CACHED, SlotState.FILLED),
        (SlotState.CACHED, SlotState.FREE),
    }
)
_TABLES = {Tier.DEVICE: DEVICE_TRANSITIONS, Tier.HOST: HOST_TRANSITIONS}
_FIRST_STATE = {Tier.DEVICE: SlotState.LEASED, Tier.HOST: SlotState.RESERVED}
PADDING_SLOT = 0


@dataclass(slots=True)
class _Slot:
    state: SlotState = SlotState.FREE
    leases: int = 0
    block_hash: BlockHash | None = None
    parent: BlockHash | None = None
    pending: BatchId | None = None


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A snapshot for metrics and checks; free + leased + cached == usable."""

    usable: int
    free: int
    leased: int
    cached: int
    published: int


@dataclass(slots=True)
class BlockPool:
    """The slots of one tier.

    Args:
        tier: `Tier.DEVICE` or `Tier.HOST`; chooses the transition table.
        num_slots: slots including the padding slot 0; usable = num_slots - 1.
        policy: order of eviction.
        on_evict: called with the hash of every block that eviction or a drop makes unfindable.
    """

    tier: Tier
    num_slots: int
    policy: EvictionPolicy = field(default_factory=LRU)
    on_evict: Callable[[BlockHash], None] | None = None
    num_evictions: int = 0
    _slots: list[_Slot] = field(init=False)
    _free: list[int] = field(init=False)
    _index: dict[BlockHash, int] = field(init=False, default_factory=dict)
    _children: dict[BlockHash, int] = field(init=False, default_factory=dict)
    _num_cached: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.num_slots < 2:
            msg = f"a pool needs at least 2 slots (one is padding), got {self.num_slots}"
            raise ValueError(msg)
        self._slots = [_Slot() for _ in range(self.num_slots)]
        self._free = list(range(self.num_slots - 1, PADDING_SLOT, -1))

    # lookups: no effect

    @property
    def usable(self) -> int:
        """Slots that can ever be leased."""
        return self.num_slots - 1

    @property
    def available(self) -> int:
        """Slots a lease can have now: free, or cached and therefore evictable sooner or later in one call."""
        return len(self._free) + self._num_cached

    def counts(self) -> PoolCounts:
        """Current accounting."""
        free = len(self._free)
        return PoolCounts(self.usable, free, self.usable - free - self._num_cached, self._num_cached, len(self._index))

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The slot published under ``block_hash``."""
        return self._index.get(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Slots of the longest published run from the start of ``hashes``."""
        run: list[int] = []
        for block_hash in hashes:
            slot = self._index.get(block_hash)
            if slot is None:
                break
            run.append(slot)
        return run

    def probe(self, hashes: Sequence[BlockHash]) -> list[int | None]:
        """The slot of every hash, None = hole."""
        return [self.lookup(block_hash) for block_hash in hashes]

    def state(self, slot: int) -> SlotState:
        """State of one slot."""
        return self._slots[slot].state

    def leases(self, slot: int) -> int:
        """Number of holders of one slot."""
        return self._slots[slot].leases

    def pending(self, slot: int) -> BatchId | None:
        """The batch whose restore fills this slot, while it has not."""
        return self._slots[slot].pending

    def is_published(self, slot: int) -> bool:
        """Whether a lookup finds this very slot."""
        return self._slots[slot].block_hash is not None

    # leasing

    def lease(self, count: int) -> list[int]:
        """Lease ``count`` fresh slots, evicting exactly the shortfall. All or nothing.

        Raises:
            PoolExhausted: fewer are available; nothing changed.
        """
        if count > self.available:
            msg = f"{self.tier} pool: {count} slots wanted, {self.available} available of {self.usable}"
            raise PoolExhausted(msg)
        while len(self._free) < count:
            self._evict_one()
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._move(slot, _FIRST_STATE[self.tier])
            self._slots[slot].leases = 1
        return slots

    def share(self, slot: int) -> None:
        """Add a holder to a leased or cached slot."""
        record = self._slots[slot]
        if record.state is SlotState.CACHED:
            self._withhold(slot)
            self._num_cached -= 1
            self._move(slot, SlotState.FILLED)
        elif record.leases == 0:
            msg = f"{self.tier} slot {slot} is {record.state} and cannot be shared"
            raise IntegrityError(msg)
        record.leases += 1

    def hit(self, slots: Iterable[int]) -> None:
        """Tell the policy that a request matched these published slots."""
        for slot in slots:
            block_hash = self._slots[slot].block_hash
            if block_hash is not None:
                self.policy.hit(block_hash)

    def release(self, slots: Iterable[int]) -> None:
        """Drop one lease of each slot, deepest block first so that roots are evicted last.

        The last lease of a published, filled slot caches it; of any other slot frees it.
        """
        for slot in reversed(list(slots)):
            record = self._slots[slot]
            if record.leases <= 0:
                msg = f"{self.tier} slot {slot} released more often than leased"
                raise IntegrityError(msg)
            record.leases -= 1
            if record.leases == 0:
                self._settle_unheld(slot)

    # content

    def begin(self, slots: Iterable[int], state: SlotState) -> None:
        """A copy into these slots starts: RESTORING, FETCHING or OFFLOADING."""
        for slot in slots:
            self._move(slot, state)

    def fill(self, slots: Iterable[int]) -> None:
        """The content is whole. Idempotent on slots that are filled already."""
        for slot in slots:
            if self._slots[slot].state is not SlotState.FILLED:
                self._move(slot, SlotState.FILLED)
            self._slots[slot].pending = None

    def publish(
        self,
        slot: int,
        block_hash: BlockHash,
        parent: BlockHash | None,
        pending: BatchId | None = None,
    ) -> int:
        """Make ``slot`` findable under ``block_hash``; returns the slot that is findable afterwards.

        If another slot already is, that one stays and is returned: the caller's copy remains private. ``pending``
        names the batch that will fill a RESTORING slot; without it the slot must be FILLED.
        """
        record = self._slots[slot]
        resident = self._index.get(block_hash)
        if resident is not None:
            return resident
        allowed = SlotState.FILLED if pending is None else SlotState.RESTORING
        if record.state is not allowed or record.block_hash is not None:
            msg = f"{self.tier} slot {slot} is {record.state} and cannot be published (pending={pending})"
            raise IntegrityError(msg)
        record.block_hash, record.parent, record.pending = block_hash, parent, pending
        self._index[block_hash] = slot
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            above = self._index.get(parent)
            if above is not None and self._children[parent] == 1 and self._slots[above].state is SlotState.CACHED:
                self.policy.remove(above)
        return slot

    def unpublish(self, slot: int) -> None:
        """Make ``slot`` unfindable; its holders keep it."""
        record = self._slots[slot]
        if record.block_hash is None:
            return
        del self._index[record.block_hash]
        if self.on_evict is not None:
            self.on_evict(record.block_hash)
        if record.parent is not None:
            self._forget_child(record.parent)
        record.block_hash = record.parent = record.pending = None

    def drop_cached(self) -> int:
        """Free every slot that only the cache holds; returns how many."""
        dropped = 0
        while len(self.policy):
            self._evict_one()
            self.num_evictions -= 1
            dropped += 1
        return dropped

    # checks

    def check_integrity(self) -> None:
        """Recount everything from the slots themselves.

        Raises:
            IntegrityError: something does not add up; the message says what.
        """
        faults: list[str] = []
        by_state = {state: [i for i, s in enumerate(self._slots) if s.state is state] for state in SlotState}
        free, cached = by_state[SlotState.FREE], by_state[SlotState.CACHED]
        if sorted([*self._free, PADDING_SLOT]) != free:
            faults.append("free list differs from free slots")
        if len(cached) != self._num_cached:
            faults.append(f"{len(cached)} cached slots, {self._num_cached} counted")
        for slot, record in enumerate(self._slots):
            unheld = record.state in (SlotState.FREE, SlotState.CACHED)
            if unheld != (record.leases == 0):
                faults.append(f"slot {slot} is {record.state} with {record.leases} leases")
            if record.block_hash is not None and self.lookup(record.block_hash) != slot:
                faults.append(f"slot {slot} believes to be published and is not")
            if record.state is SlotState.FREE and record.block_hash is not None:
                faults.append(f"slot {slot} is free and published")
            if record.state is SlotState.CACHED and record.block_hash is None:
                faults.append(f"slot {slot} is cached and unpublished")
        children: dict[BlockHash, int] = {}
        for record in self._slots:
            if record.parent is not None:
                children[record.parent] = children.get(record.parent, 0) + 1
        if children != self._children:
            faults.append("children counted differ from children published")
        for block_hash, slot in self._index.items():
            if self._slots[slot].block_hash != block_hash:
                faults.append(f"index entry of slot {slot} is stale")
        leaves = sum(1 for slot in cached if self._is_leaf(slot))
        if leaves != len(self.policy):
            faults.append(f"{leaves} evictable slots, policy knows {len(self.policy)}")
        if faults:
            raise IntegrityError(f"{self.tier} pool: " + "; ".join(faults))

    # the only writers of state

    def _move(self, slot: int, state: SlotState) -> None:
        record = self._slots[slot]
        if slot == PADDING_SLOT or (record.state, state) not in _TABLES[self.tier]:
            msg = f"{self.tier} slot {slot}: {record.state} -> {state} is not allowed"
            raise IntegrityError(msg)
        record.state = state

    def _settle_unheld(self, slot: int) -> None:
        record = self._slots[slot]
        if record.state is SlotState.FILLED and record.block_hash is not None:
            self._move(slot, SlotState.CACHED)
            self._num_cached += 1
            if self._is_leaf(slot):
                self.policy.insert(slot, record.block_hash)
            return
        self.unpublish(slot)
        self._move(slot, SlotState.FREE)
        self._free.append(slot)

    def _is_leaf(self, slot: int) -> bool:
        block_hash = self._slots[slot].block_hash
        return block_hash is not None and block_hash not in self._children

    def _withhold(self, slot: int) -> None:
        if self._is_leaf(slot):
            self.policy.remove(slot)

    def _forget_child(self, parent: BlockHash) -> None:
        self._children[parent] -= 1
        if self._children[parent]:
            return
        del self._children[parent]
        above = self._index.get(parent)
        if above is not None and self._slots[above].state is SlotState.CACHED:
            self.policy.insert(above, parent)

    def _evict_one(self) -> None:
        if len(self.policy):
            slot = self.policy.victim()
            self.policy.remove(slot)
        else:  # only withheld slots are left: a request holds a private duplicate of the root, not the root itself
            slot = next(i for i, record in enumerate(self._slots) if record.state is SlotState.CACHED)
        self._num_cached -= 1
        self.num_evictions += 1
        self.unpublish(slot)
        self._move(slot, SlotState.FREE)
        self._free.append(slot)
