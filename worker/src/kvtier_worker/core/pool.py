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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_COPYING = frozenset({SlotState.RESTORING, SlotState.FETCHING, SlotState.OFFLOADING})
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
        on_evict: called with the hash of every block that stops being findable.
        num_evictions: cached blocks given up so far because a lease needed their slots.
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

    def __post_init__(self) -> None:
        if self.num_slots <= PADDING_SLOT + 1:
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
        """Slots a lease can have now: free or cached."""
        return len(self._free) + len(self.policy)

    def counts(self) -> PoolCounts:
        """Current accounting."""
        free, cached = len(self._free), len(self.policy)
        return PoolCounts(self.usable, free, self.usable - free - cached, cached, len(self._index))

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

        Share what a request matched before leasing the rest, or the lease may evict the match.

        Raises:
            PoolExhausted: fewer are available; nothing changed.
        """
        if count > self.available:
            msg = f"{self.tier} pool: {count} slots wanted, {self.available} available of {self.usable}"
            raise PoolExhausted(msg)
        while len(self._free) < count:
            self._evict_one()
            self.num_evictions += 1
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._move(slot, _FIRST_STATE[self.tier])
            self._slots[slot].leases = 1
        return slots

    def share(self, slot: int) -> None:
        """Add a holder to a leased or cached slot."""
        record = self._slots[slot]
        if record.state is SlotState.CACHED:
            self._move(slot, SlotState.FILLED)
            self.policy.remove(slot)
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
        """A copy into these leased slots starts: RESTORING, FETCHING or OFFLOADING."""
        for slot in slots:
            if state not in _COPYING:
                msg = f"{self.tier} slot {slot}: {state} is not the name of a copy"
                raise IntegrityError(msg)
            self._move(slot, state)

    def fill(self, slots: Iterable[int]) -> None:
        """The content of these leased slots is whole. Idempotent on slots that are filled already."""
        for slot in slots:
            record = self._slots[slot]
            if record.leases == 0:
                msg = f"{self.tier} slot {slot} is {record.state} and filled by nobody"
                raise IntegrityError(msg)
            if record.state is not SlotState.FILLED:
                self._move(slot, SlotState.FILLED)
            record.pending = None

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
        return slot

    def unpublish(self, slot: int) -> None:
        """Make ``slot`` unfindable. Its holders keep it; a slot that only the cache holds is freed. Idempotent."""
        if self._slots[slot].state is SlotState.CACHED:
            self.policy.remove(slot)
            self._free_slot(slot)
        else:
            self._withdraw(slot)

    def drop_cached(self) -> int:
        """Free every slot that only the cache holds; returns how many."""
        dropped = len(self.policy)
        while len(self.policy):
            self._evict_one()
        return dropped

    # checks

    def check_integrity(self) -> None:
        """Recount everything from the slots themselves.

        Raises:
            IntegrityError: something does not add up; the message says what.
        """
        faults = [fault for slot, record in enumerate(self._slots) for fault in self._slot_faults(slot, record)]
        faults += self._count_faults()
        if faults:
            raise IntegrityError(f"{self.tier} pool: " + "; ".join(faults))

    def _slot_faults(self, slot: int, record: _Slot) -> Iterator[str]:
        unheld = record.state in (SlotState.FREE, SlotState.CACHED)
        if record.leases < 0 or unheld != (record.leases == 0):
            yield f"slot {slot} is {record.state} with {record.leases} leases"
        if record.block_hash is not None and self.lookup(record.block_hash) != slot:
            yield f"slot {slot} believes to be published and is not"
        if record.state is SlotState.CACHED and record.block_hash is None:
            yield f"slot {slot} is cached and unpublished"
        findable = record.state in (SlotState.FILLED, SlotState.CACHED) or record.pending is not None
        if record.block_hash is not None and not findable:
            yield f"slot {slot} is {record.state} and published"
        if record.pending is not None and (record.state is not SlotState.RESTORING or record.block_hash is None):
            yield f"slot {slot} is {record.state} and waits for batch {record.pending}"

    def _count_faults(self) -> Iterator[str]:
        free = [slot for slot, record in enumerate(self._slots) if record.state is SlotState.FREE]
        if sorted([*self._free, PADDING_SLOT]) != free:
            yield "free list differs from free slots"
        cached = sum(record.state is SlotState.CACHED for record in self._slots)
        if cached != len(self.policy):
            yield f"{cached} cached slots, policy knows {len(self.policy)}"
        for block_hash, slot in self._index.items():
            if self._slots[slot].block_hash != block_hash:
                yield f"index entry of slot {slot} is stale"
        if Counter(record.parent for record in self._slots if record.parent is not None) != self._children:
            yield "children counted differ from children published"

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
            self.policy.insert(slot, record.block_hash)
        else:
            self._free_slot(slot)

    def _evict_one(self) -> None:
        self._free_slot(self.policy.evict(self._is_leaf))

    def _free_slot(self, slot: int) -> None:
        self._withdraw(slot)
        self._move(slot, SlotState.FREE)
        self._free.append(slot)

    def _withdraw(self, slot: int) -> None:
        record = self._slots[slot]
        block_hash, parent = record.block_hash, record.parent
        if block_hash is None:
            return
        record.block_hash = record.parent = record.pending = None
        del self._index[block_hash]
        if parent is not None:
            self._forget_child(parent)
        if self.on_evict is not None:
            self.on_evict(block_hash)

    def _forget_child(self, parent: BlockHash) -> None:
        self._children[parent] -= 1
        if self._children[parent]:
            return
        del self._children[parent]
        above = self._index.get(parent)
        if above is not None and self._slots[above].state is SlotState.CACHED:
            self.policy.expose(above)

    def _is_leaf(self, slot: int) -> bool:
        return self._slots[slot].block_hash not in self._children
