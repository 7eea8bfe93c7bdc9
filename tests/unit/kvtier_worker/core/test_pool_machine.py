"""The block pool under any mix of what requests, copies and administrators do, against a model of who holds what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kvtier_worker.core.eviction import LRU, S3FIFO, EvictionPolicy
from kvtier_worker.core.ids import BatchId, BlockHash, Tier
from kvtier_worker.core.pool import PADDING_SLOT, BlockPool, SlotState
from kvtier_worker.errors import IntegrityError, PoolExhausted

USABLE = 9
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
PICK = st.integers(0, 99)


class TinyS3FIFO(S3FIFO):
    """With spans of one block and no warm-up, so that the tables decide within a few steps."""

    MIN_SPAN = 1
    WARM_UP = 0


@dataclass
class Holder:
    """A request or a job: its slots in token order and how far each got."""

    path: list[int]
    slots: list[int]
    num_shared: int
    num_filled: int
    num_published: int
    copying: bool = False
    pending: list[int] = field(default_factory=list)


def hashes(path: list[int]) -> list[BlockHash]:
    return [BlockHash(bytes([*path[: end + 1], 255]).ljust(16, b".")) for end in range(len(path))]


class PoolMachine(RuleBasedStateMachine):
    """Rules do what the scheduler does; the model knows holders, contents and what must be findable."""

    tier = Tier.DEVICE

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make_policy()
        self.pool = BlockPool(self.tier, USABLE + 1, self.policy, on_evict=self.gone)
        self.holders: list[Holder] = []
        self.jobs: list[int] = []
        self.published: dict[BlockHash, int] = {}
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.content: dict[int, BlockHash] = {}
        self.leasing = False

    def make_policy(self) -> EvictionPolicy:
        return LRU()

    def gone(self, block_hash: BlockHash) -> None:
        slot = self.published.pop(block_hash)
        if not self.leasing:
            return
        assert self.pool.leases(slot) == 0, "evicted while leased"
        if self.has_children(block_hash):
            cached = [h for h, s in self.published.items() if self.pool.leases(s) == 0]
            assert all(self.has_children(h) for h in cached), "a root was evicted before a resident tail"

    def has_children(self, block_hash: BlockHash) -> bool:
        return any(self.parents[other] == block_hash for other in self.published)

    def held(self) -> Counter[int]:
        return Counter(slot for holder in self.holders for slot in holder.slots) + Counter(self.jobs)

    def holder(self, pick: int) -> Holder:
        return self.holders[pick % len(self.holders)]

    @rule(path=PATHS, share_from=st.integers(0, 1))
    def start(self, path: list[int], share_from: int) -> None:
        """A request matches and leases the rest. Now and then it keeps a private copy of the root."""
        wanted = hashes(path)
        run = self.pool.match(wanted) if share_from == 0 else []
        for slot, block_hash in zip(run, wanted, strict=False):
            assert self.content.get(slot) == block_hash or self.pool.pending(slot) is not None
            self.pool.share(slot)
        self.pool.hit(run)
        before, findable = self.pool.counts(), dict(self.published)
        self.leasing = True
        try:
            fresh = self.pool.lease(len(path) - len(run))
        except PoolExhausted:
            assert self.pool.available < len(path) - len(run)
            assert (self.pool.counts(), self.published) == (before, findable)
            fresh = None
        self.leasing = False
        if fresh is None:
            self.pool.release(run)
            return
        assert not set(fresh) & set(self.held())
        assert PADDING_SLOT not in fresh
        for slot in fresh:
            self.content.pop(slot, None)
        self.holders.append(Holder(path, run + fresh, len(run), len(run), len(run)))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def begin_copy(self, pick: int) -> None:
        holder = self.holder(pick)
        if holder.copying or holder.num_filled > holder.num_shared:
            return
        state = SlotState.RESTORING if self.tier is Tier.DEVICE else SlotState.FETCHING
        self.pool.begin(holder.slots[holder.num_filled :], state)
        holder.copying = True

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def publish_pending(self, pick: int) -> None:
        holder = self.holder(pick)
        if self.tier is not Tier.DEVICE or not holder.copying or holder.num_filled > holder.num_shared:
            return
        self.publish(holder, len(holder.slots), BatchId(pick))

    @precondition(lambda self: self.holders)
    @rule(pick=PICK, count=st.integers(1, 4))
    def fill(self, pick: int, count: int) -> None:
        holder = self.holder(pick)
        if self.tier is Tier.HOST and not holder.copying:
            return
        stop = min(holder.num_filled + count, len(holder.slots))
        wanted = hashes(holder.path)
        for index in range(holder.num_filled, stop):
            self.pool.fill([holder.slots[index]])
            self.content[holder.slots[index]] = wanted[index]
        holder.num_filled = max(holder.num_filled, stop)

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def publish_filled(self, pick: int) -> None:
        holder = self.holder(pick)
        self.publish(holder, holder.num_filled, None)

    def publish(self, holder: Holder, stop: int, pending: BatchId | None) -> None:
        wanted = hashes(holder.path)
        for index in range(holder.num_published, stop):
            parent = wanted[index - 1] if index else None
            slot, resident = holder.slots[index], self.published.get(wanted[index])
            found = self.pool.publish(slot, wanted[index], parent, pending)
            assert found == (slot if resident is None else resident)
            self.published[wanted[index]] = found
            self.parents[wanted[index]] = parent
        holder.num_published = max(holder.num_published, stop)

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def abort_pending(self, pick: int) -> None:
        """The batch of a restore fails: its blocks are unpublished; who waits for them goes too."""
        holder = self.holder(pick)
        broken = {slot for slot in holder.slots if self.pool.pending(slot) is not None}
        for slot in broken:
            self.pool.unpublish(slot)
        if broken:
            for dependant in [other for other in self.holders if broken & set(other.slots)]:
                self.end(dependant)

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        holder = self.holder(pick)
        waiting = any(self.pool.pending(slot) is not None for slot in holder.slots)
        if not waiting:
            self.end(holder)

    def end(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.pool.release(holder.slots)

    @rule(path=PATHS)
    def start_job(self, path: list[int]) -> None:
        """A write-back holds one whole block, and perhaps longer than its request."""
        slot = self.pool.lookup(hashes(path)[-1])
        if slot is not None and self.pool.pending(slot) is None:
            self.pool.share(slot)
            self.jobs.append(slot)

    @precondition(lambda self: self.jobs)
    @rule(pick=PICK)
    def end_job(self, pick: int) -> None:
        self.pool.release([self.jobs.pop(pick % len(self.jobs))])

    @rule(path=PATHS)
    def forget(self, path: list[int]) -> None:
        """A block turns out corrupt."""
        slot = self.pool.lookup(hashes(path)[-1])
        if slot is not None and self.pool.pending(slot) is None:
            self.pool.unpublish(slot)

    @rule()
    def drop(self) -> None:
        cached = self.pool.counts().cached
        assert self.pool.drop_cached() == cached
        assert self.pool.counts().cached == 0

    @precondition(lambda self: self.holders)
    @rule(pick=PICK)
    def over_release(self, pick: int) -> None:
        """A slot that nobody holds cannot be released."""
        free = [slot for slot in range(1, USABLE + 1) if slot not in self.held()]
        if free:
            with pytest.raises(IntegrityError):
                self.pool.release([free[pick % len(free)]])

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check_integrity()
        counts, held = self.pool.counts(), self.held()
        assert counts.free + counts.leased + counts.cached == USABLE
        assert counts.leased == len(held)
        assert all(self.pool.leases(slot) == held[slot] for slot in range(1, USABLE + 1))
        assert self.pool.available == USABLE - len(held)

    @invariant()
    def what_is_findable_is_whole_or_pending(self) -> None:
        assert self.pool.counts().published == len(self.published)
        for block_hash, slot in self.published.items():
            assert self.pool.lookup(block_hash) == slot
            assert self.content.get(slot) == block_hash or self.pool.pending(slot) is not None

    def teardown(self) -> None:
        while self.holders:
            self.end(self.holders[0])
        self.pool.release(self.jobs)
        assert self.pool.counts().leased == 0
        self.pool.drop_cached()
        self.pool.check_integrity()
        assert self.pool.counts().free == USABLE


class AdaptivePoolMachine(PoolMachine):
    """The same under the adaptive policy."""

    def make_policy(self) -> EvictionPolicy:
        return TinyS3FIFO(USABLE)


class HostPoolMachine(PoolMachine):
    """The same with the host's transitions."""

    tier = Tier.HOST


class AdaptiveHostPoolMachine(AdaptivePoolMachine):
    """Both."""

    tier = Tier.HOST


@pytest.mark.parametrize("machine", [PoolMachine, AdaptivePoolMachine, HostPoolMachine, AdaptiveHostPoolMachine])
def test_pool_keeps_its_invariants_whatever_happens(machine: type[PoolMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=50, deadline=None))
