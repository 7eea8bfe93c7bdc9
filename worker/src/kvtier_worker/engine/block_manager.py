"""Blocks of every live request over the device pool and the host pool; xLLM's HierarchyBlockManagerPool.

It leases, shares, publishes and releases; it sends nothing and knows no clock. Called by the engine thread only, and
only between steps: while a step is in flight nothing of the requests in it is changed.

What a device block contains follows from its provenance, never from counting holders (R4):

    COMPUTED   this request computes it; published once the step that completed it succeeded
    SHARED     it was on the device; pending ones only of the batch being planned (same synchroniser)
    RESTORED   copied from a host slot by the batch being planned; published before the copy (R1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_worker.core.ids import BatchId, BlockHash, BlockId, HostSlot, JobId, Tier
from kvtier_worker.core.plans import RestoreItem, WritebackItem
from kvtier_worker.core.pool import BlockPool, SlotState
from kvtier_worker.core.prefix import PrefixMatch, match_tiers, usable_run
from kvtier_worker.engine.host_tier import FetchNeed, HostTier, WritebackEntry
from kvtier_worker.engine.requests import COMPUTED, SHARED, LiveRequest, Origin, Provenance
from kvtier_worker.engine.tier_match import TierMatch, parent_of, sources


@dataclass(slots=True)
class TieredBlockManager:
    """See the module.

    Args:
        device: device pool.
        host: host tier; None = there is none.
        block_size: tokens in a block.
        prefix_cache: whether blocks are found again.
    """

    device: BlockPool
    host: HostTier | None
    block_size: int
    prefix_cache: bool = True

    # before scheduling

    def plan_prefetch(self, live: LiveRequest, job_id: JobId) -> FetchNeed | None:
        """Pin what the host has of the prompt and lease slots for its holes; None without a host tier.

        Blocks that the device has are not fetched. The last prompt token is always computed, so a block that ends
        with it is of no use to this request.
        """
        if self.host is None or not self.prefix_cache:
            return None
        hashes = self._usable_hashes(live)
        host = self.pin_resident(live)
        missing = [i for i, slot in enumerate(host) if slot is None and self._settled(hashes[i]) is None]
        return self.host.plan_fetch(job_id, hashes, missing)

    def pin_resident(self, live: LiveRequest) -> Sequence[int | None]:
        """Pin what the host has of the prompt; returns its slot per usable block, None = hole."""
        if self.host is None or not self.prefix_cache:
            return []
        host = self.host.pool.probe(self._usable_hashes(live))
        for index, slot in enumerate(host):
            if slot is not None:
                self._pin(live, index, slot)
        return host

    def pin_fetched(self, live: LiveRequest, indices: Sequence[int]) -> bool:
        """Pin the blocks at ``indices`` that a job has published; False if one of them is missing."""
        assert self.host is not None
        hashes = self._usable_hashes(live)
        complete = True
        for index in indices:
            slot = self.host.pool.lookup(hashes[index])
            if slot is None:
                complete = False
                continue
            live.held.store_filled.add(index)
            self._pin(live, index, slot)
        return complete

    def mount(self, live: LiveRequest) -> int:
        """Trim the pins to the prefix without holes; returns its blocks."""
        if self.host is None:
            return 0
        hashes = self._usable_hashes(live)
        pins = [live.held.pins.get(index) for index in range(len(hashes))]
        reach = usable_run([self._settled(block_hash) for block_hash in hashes], pins)
        self._unpin(live, [index for index in live.held.pins if index >= reach])
        return reach

    # scheduling

    def match(self, live: LiveRequest, batch_id: BatchId) -> TierMatch:
        """What the tiers hold of ``live`` for a step planned as ``batch_id``. No effect."""
        hashes = self._usable_hashes(live)
        device = [self._matchable(block_hash, batch_id) for block_hash in hashes]
        use_host = self.host is not None and not live.shun_host
        host = self.host.pool.probe(hashes) if self.host is not None and use_host else []
        prefix = match_tiers(device, host, prompt_tokens=len(live.tokens), block_size=self.block_size)
        return TierMatch(prefix, hashes, device, host)

    def allocate(
        self, live: LiveRequest, match: TierMatch, prefix: PrefixMatch, batch_id: BatchId, *, headroom: int = 0
    ) -> tuple[RestoreItem, ...] | None:
        """Lease device blocks for all tokens of ``live``, its first ones from ``prefix``.

        Args:
            live: holds no device block.
            match: of this request, made since anything last changed.
            prefix: ``match.prefix`` or a trimmed one.
            batch_id: the step being planned.
            headroom: blocks that must stay available to others.

        Returns:
            What to restore, or None: not enough device blocks, and nothing whatsoever changed.
        """
        count = len(prefix.tiers)
        shared = [block for block in match.device[:count] if block is not None]
        num_fresh = -(-len(live.tokens) // self.block_size) - len(shared)
        num_revived = sum(self.device.state(block) is SlotState.CACHED for block in shared)
        if num_fresh + headroom > self.device.available - num_revived:
            return None
        for block in shared:
            self.device.share(block)
        self.device.hit(shared)
        fresh = iter(self.device.lease(num_fresh))
        items: list[RestoreItem] = []
        held = live.held
        for index, (found, slot) in enumerate(sources(match, count)):
            if found is None:
                restored = next(fresh)
                item = RestoreItem(slot, BlockId(restored))
                self._begin_restore(live, item, index)
                self.device.publish(restored, match.hashes[index], parent_of(match.hashes, index), pending=batch_id)
                items.append(item)
                held.provenance.append(Provenance(Origin.RESTORED, slot))
                held.table.append(restored)
            else:
                held.table.append(found)
                held.provenance.append(SHARED)
        held.table.extend(fresh)
        held.provenance.extend([COMPUTED] * (len(held.table) - count))
        self._unpin(live, list(held.pins))
        live.num_computed = prefix.num_tokens
        return tuple(items)

    def grow(self, live: LiveRequest) -> bool:
        """Lease one more device block; False if there is none."""
        if not self.device.available:
            return False
        live.held.table += self.device.lease(1)
        live.held.provenance.append(COMPUTED)
        return True

    def reserve_writeback(self, live: LiveRequest, end: int) -> None:
        """Reserve host slots for the blocks that are complete once tokens ``[0, end)`` are computed; best effort."""
        stop = end // self.block_size
        if self.host is None or not self.prefix_cache or stop <= live.held.num_settled:
            return
        hashes = live.chain.extend(live.tokens, stop)
        for index in range(live.held.num_settled, stop):
            if live.held.provenance[index].origin is Origin.COMPUTED and index not in live.held.reserved:
                slot = self.host.reserve(hashes[index])
                if slot is not None:
                    live.held.reserved[index] = slot

    # after a step

    def settle(self, live: LiveRequest) -> list[WritebackEntry]:
        """The step succeeded and ``num_computed`` says how far: publish what is whole, return what to write back."""
        stop = live.num_computed // self.block_size
        held = live.held
        if not self.prefix_cache or stop <= held.num_settled:
            return []
        self._release_restored(live)
        hashes = live.chain.extend(live.tokens, stop)
        first = held.num_settled
        for index in range(first, stop):
            self._settle_block(live, index, hashes)
        held.num_settled = stop
        return self._collect(live, first, stop, hashes)

    def retire(self, live: LiveRequest) -> list[WritebackEntry]:
        """Finish or preemption: release everything; returns what is still to be written back."""
        stop = live.held.num_settled
        entries: list[WritebackEntry] = []
        if self.host is not None and stop:
            entries = self._collect(live, 0, stop, live.chain.extend(live.tokens, stop))
        self.release(live)
        return entries

    def abort_pending(self, live: LiveRequest) -> None:
        """The step of ``live`` failed and touches nothing any more: make unfindable what it was to restore."""
        held = live.held
        for block, provenance in zip(held.table, held.provenance, strict=True):
            if provenance.origin is Origin.RESTORED and self.device.state(block) is SlotState.RESTORING:
                self.device.unpublish(block)

    def release(self, live: LiveRequest) -> None:
        """Drop every lease of a request that no step touches."""
        held = live.held
        if self.host is not None:
            self._release_restored(live)
            self._unpin(live, list(held.pins))
            if held.reserved:
                hashes = live.chain.extend(live.tokens, max(held.reserved) + 1)
                for index, slot in held.reserved.items():
                    self.host.unreserve(slot, hashes[index])
                held.reserved.clear()
        self.device.release(held.table)
        held.table.clear()
        held.provenance.clear()
        held.num_settled = 0
        live.num_computed = 0

    # cached tokens

    def cached_tokens(self, live: LiveRequest) -> dict[Tier, int]:
        """Tokens of the prefix that ``live`` did not have to compute, by tier, from provenance."""
        counts = dict.fromkeys(Tier, 0)
        for index, provenance in enumerate(live.held.provenance):
            if provenance.origin is Origin.COMPUTED:
                break
            tier = Tier.DEVICE
            if provenance.origin is Origin.RESTORED:
                tier = Tier.STORE if index in live.held.store_filled else Tier.HOST
            counts[tier] += self.block_size
        return counts

    # private

    def _usable_hashes(self, live: LiveRequest) -> Sequence[BlockHash]:
        if not self.prefix_cache:
            return []
        return live.chain.extend(live.tokens, (len(live.tokens) - 1) // self.block_size)

    def _settled(self, block_hash: BlockHash) -> int | None:
        block = self.device.lookup(block_hash)
        return block if block is not None and self.device.pending(block) is None else None

    def _matchable(self, block_hash: BlockHash, batch_id: BatchId) -> int | None:
        block = self.device.lookup(block_hash)
        return block if block is not None and self.device.pending(block) in (None, batch_id) else None

    def _pin(self, live: LiveRequest, index: int, slot: int) -> None:
        assert self.host is not None
        if index not in live.held.pins:
            self.host.pool.share(slot)
            self.host.pool.hit([slot])
            live.held.pins[index] = slot

    def _unpin(self, live: LiveRequest, indices: Sequence[int]) -> None:
        if indices and self.host is not None:
            self.host.pool.release([live.held.pins.pop(index) for index in sorted(indices)])

    def _begin_restore(self, live: LiveRequest, item: RestoreItem, index: int) -> None:
        assert self.host is not None
        self.host.pool.share(item.host_slot)
        if index not in live.held.pins:
            self.host.pool.hit([item.host_slot])
        live.held.restoring.append(item.host_slot)
        self.device.begin([item.device_block], SlotState.RESTORING)

    def _release_restored(self, live: LiveRequest) -> None:
        if live.held.restoring and self.host is not None:
            self.host.pool.release(live.held.restoring)
            live.held.restoring.clear()

    def _settle_block(self, live: LiveRequest, index: int, hashes: Sequence[BlockHash]) -> None:
        held = live.held
        block, origin = held.table[index], held.provenance[index].origin
        if origin is Origin.SHARED:
            return
        self.device.fill([block])
        resident = self.device.publish(block, hashes[index], parent_of(hashes, index))
        if resident != block and self.device.pending(resident) is None:
            self.device.share(resident)
            self.device.release([block])
            held.table[index] = resident
            held.provenance[index] = SHARED

    def _collect(self, live: LiveRequest, start: int, stop: int, hashes: Sequence[BlockHash]) -> list[WritebackEntry]:
        entries: list[WritebackEntry] = []
        host = self.host
        if host is None:
            return entries
        for index in range(start, stop):
            slot = live.held.reserved.pop(index, None)
            if slot is None:
                slot = host.reserve(hashes[index])
            elif host.pool.lookup(hashes[index]) is not None:
                host.unreserve(slot, hashes[index])
                slot = None
            if slot is not None:
                block = live.held.table[index]
                self.device.share(block)
                host.pool.begin([slot], SlotState.OFFLOADING)
                item = WritebackItem(BlockId(block), HostSlot(slot), hashes[index])
                entries.append(WritebackEntry(item, parent_of(hashes, index)))
        return entries
