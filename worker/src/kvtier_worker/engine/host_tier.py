"""The host tier as the engine thread sees it: slots being fetched into, slots being written back into, pins.

The pool knows states and leases; this adds which hash is on its way, so that no block is fetched twice, written back
twice, or copied although it is there. Every lease taken here has one owner: a prefetch job, a write-back job, or a
request's `Holdings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtier_worker.core.ids import BlockHash, HostSlot, JobId
from kvtier_worker.core.plans import PrefetchItem, PrefetchPlan, WritebackItem
from kvtier_worker.core.pool import BlockPool, SlotState


@dataclass(frozen=True, slots=True)
class FetchNeed:
    """What a request lacks on the host.

    Attributes:
        plan: what to read, lowest block first; may be empty.
        indices: block index of each item of ``plan``.
        parents: hash of the block before each item's, None for block 0.
        awaited: block indices that other jobs are fetching already, by job.
    """

    plan: PrefetchPlan
    indices: tuple[int, ...]
    parents: tuple[BlockHash | None, ...]
    awaited: Mapping[JobId, tuple[int, ...]]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to wait for."""
        return not (self.plan.items or self.awaited)


@dataclass(frozen=True, slots=True)
class WritebackEntry:
    """One block to write back; ``parent`` is the hash of the block before it, None for block 0."""

    item: WritebackItem
    parent: BlockHash | None


@dataclass(slots=True)
class HostTier:
    """Hashes in motion to and from one host pool.

    Attributes:
        pool: the slots.
        fetching: which job fetches a hash from the store.
        outgoing: hashes reserved for a write-back, or in one that has not been copied yet.
    """

    pool: BlockPool
    fetching: dict[BlockHash, JobId] = field(default_factory=dict)
    outgoing: set[BlockHash] = field(default_factory=set)

    # store -> host

    def plan_fetch(self, job_id: JobId, hashes: Sequence[BlockHash], missing: Sequence[int]) -> FetchNeed:
        """Lease slots for the ``missing`` blocks, lowest first, as far as there are any (holes may be anywhere)."""
        own = [index for index in missing if hashes[index] not in self.fetching]
        num_leased = min(len(own), self.pool.available)
        reach = own[num_leased] if num_leased < len(own) else len(hashes)
        own = own[:num_leased]
        slots = self.pool.lease(num_leased)
        self.pool.begin(slots, SlotState.FETCHING)
        awaited: dict[JobId, list[int]] = {}
        for index in missing:
            other = self.fetching.get(hashes[index])
            if other is not None and index < reach:
                awaited.setdefault(other, []).append(index)
        for index in own:
            self.fetching[hashes[index]] = job_id
        items = tuple(PrefetchItem(HostSlot(slot), hashes[index]) for slot, index in zip(slots, own, strict=True))
        return FetchNeed(
            plan=PrefetchPlan(job_id, items),
            indices=tuple(own),
            parents=tuple(hashes[index - 1] if index else None for index in own),
            awaited={job: tuple(indices) for job, indices in awaited.items()},
        )

    def drop_unsent(self, need: FetchNeed, num_sent: int) -> FetchNeed:
        """The job stops: give up what it never sent, which no rank writes into and any other job may fetch.

        Args:
            need: of the job.
            num_sent: items that ranks were asked for, the first ones.

        Returns:
            What is left of ``need``.
        """
        unsent = need.plan.items[num_sent:]
        for item in unsent:
            del self.fetching[item.block_hash]
        self.pool.release([item.host_slot for item in unsent])
        plan = PrefetchPlan(need.plan.job_id, need.plan.items[:num_sent])
        return replace(need, plan=plan, indices=need.indices[:num_sent], parents=need.parents[:num_sent])

    def publish_fetched(self, need: FetchNeed, hits: Sequence[bool]) -> None:
        """Make every hit findable, those behind a hole too. A block that lost to a resident one stays private.

        May be called again with more hits.
        """
        for item, parent, hit in zip(need.plan.items, need.parents, hits, strict=True):
            if hit:
                self.pool.fill([item.host_slot])
                self.pool.publish(item.host_slot, item.block_hash, parent)

    def release_fetched(self, need: FetchNeed) -> None:
        """The job is over: drop its leases; misses become free."""
        for item in need.plan.items:
            del self.fetching[item.block_hash]
        self.pool.release([item.host_slot for item in need.plan.items])

    # device -> host

    def reserve(self, block_hash: BlockHash) -> int | None:
        """A slot for the write-back of a block, or None: it is there, on its way, or no slot is to be had."""
        if block_hash in self.outgoing or not self.pool.available or self.pool.lookup(block_hash) is not None:
            return None
        self.outgoing.add(block_hash)
        return self.pool.lease(1)[0]

    def unreserve(self, slot: int, block_hash: BlockHash) -> None:
        """Give a reserved slot back unused."""
        self.outgoing.remove(block_hash)
        self.pool.release([slot])

    def end_copy(self, entries: Sequence[WritebackEntry], *, ok: bool) -> None:
        """Every rank reported its device -> host copy. Publishes if all copied all; leases stay with the job (W2)."""
        for entry in entries:
            self.outgoing.remove(entry.item.block_hash)
            if ok:
                self.pool.fill([entry.item.host_slot])
                self.pool.publish(entry.item.host_slot, entry.item.block_hash, entry.parent)
