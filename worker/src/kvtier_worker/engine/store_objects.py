"""Logical blocks to physical objects and back: what a worker reads from, writes to and asks of the store.

One logical block is one object per domain that owns its BlockType (K7); it is there, or whole, only if every object
is (K8). All of it is best effort: a fault is a miss, counted. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_worker.core.ids import BlockHash, BlockType, CacheRole, HostSlot
from kvtier_worker.core.keys import KeySpace
from kvtier_worker.core.layout import TRAILER_BYTES
from kvtier_worker.core.plans import PrefetchItem, WritebackItem
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.ports import GetOutcome, KVCacheStore, PutOutcome, StoreBuffer
from kvtier_worker.engine.quarantine import Quarantine
from kvtier_worker.engine.trailers import sign_trailer, trailer_is_valid

CLOSED = "closed"
"""State of a circuit breaker that lets calls through."""


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Outcome of one batch.

    Attributes:
        hits: one byte per item, 1 = every object is whole in host memory.
        num_bytes: of the objects of hit blocks.
        num_faults: reads that the store did not answer.
        num_corrupt: objects whose trailer did not match.
    """

    hits: bytes
    num_bytes: int = 0
    num_faults: int = 0
    num_corrupt: int = 0


@dataclass(frozen=True, slots=True)
class PutResult:
    """Logical blocks of one write-back by outcome; the three counts add up to the items.

    ``num_existing``: every object was there already, or is another rank's to write. ``num_failed``: at least one
    object is not in the store.
    """

    num_stored: int = 0
    num_existing: int = 0
    num_failed: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One byte per hash, 1 = every object exists. ``available`` False: the store is not answering."""

    exists: bytes
    available: bool


class StoreObjects:
    """The store as one rank sees it.

    Args:
        store: where objects are.
        arena: where they go.
        keys: key space of every registered domain.
        quarantine: keys not to be fetched.
        suspects: keys that could not be read whole; a put replaces them.
        tried: keys that we tried to put; one that is not there afterwards may be stuck, and is replaced as well.
        verify: check trailers on arrival.
        writes: False on a rank whose objects another rank writes (MLA, K9).
    """

    def __init__(
        self,
        store: KVCacheStore,
        arena: HostArena,
        keys: Mapping[CacheRole, KeySpace],
        quarantine: Quarantine,
        suspects: Quarantine,
        *,
        tried: Quarantine,
        verify: bool,
        writes: bool,
    ) -> None:
        self._store = store
        self._arena = arena
        self._keys = keys
        self._quarantine = quarantine
        self._suspects = suspects
        self._tried = tried
        self._verify = verify
        self._writes = writes
        self._roles: dict[BlockType, list[CacheRole]] = {}
        for role, block_type in arena.regions:
            self._roles.setdefault(block_type, []).append(role)

    def prefetch(self, items: Sequence[PrefetchItem]) -> PrefetchResult:
        """Read blocks straight into their host slots; only those whose every object exists.

        A key or a destination that occurs twice makes the whole request a miss, without a word to the store.
        """
        blocks = [self._expand(item.block_type, item.block_hash, item.host_slot) for item in items]
        buffers = [buffer for block in blocks for buffer in block]
        if _has_duplicates(buffers):
            return PrefetchResult(bytes(len(items)))
        asked = [buffer.key for buffer in buffers if buffer.key not in self._quarantine]
        if not asked:
            return PrefetchResult(bytes(len(items)))
        exists = {key for key, there in zip(asked, self._store.exists(asked), strict=False) if there}
        wanted = [block for block in blocks if block and all(buffer.key in exists for buffer in block)]
        return self._fetch(blocks, [buffer for block in wanted for buffer in block])

    def put(self, items: Sequence[WritebackItem]) -> PutResult:
        """Write blocks from their host slots, each key once; what exists is left alone (W3).

        An object that could not be read is replaced: its node is gone for good or its bytes are wrong, the master goes
        on listing it, and no put would ever heal it. Without verification it stays, since whoever reads it at this
        moment could not tell.
        """
        if not self._writes:
            return PutResult(num_existing=len(items))
        blocks = [self._expand(item.block_type, item.block_hash, item.host_slot) for item in items]
        unique = list({buffer.key: buffer for block in reversed(blocks) for buffer in block}.values())
        outcomes = dict.fromkeys((buffer.key for buffer in unique), PutOutcome.FAILED)
        for buffer in unique:
            sign_trailer(buffer.address, buffer.nbytes - TRAILER_BYTES, buffer.key)
        if self._verify and (bad := self._to_replace([buffer.key for buffer in unique])):
            self._store.discard(bad)
        for buffer, outcome in zip(unique, self._store.put(unique) if unique else (), strict=False):
            outcomes[buffer.key] = outcome
            if outcome is PutOutcome.STORED:
                self._quarantine.release(buffer.key)
                self._suspects.release(buffer.key)
            if outcome is not PutOutcome.EXISTS:
                self._tried.add(buffer.key)
        stored = [buffer.nbytes for buffer in unique if outcomes[buffer.key] is PutOutcome.STORED]
        counts = dict.fromkeys(PutOutcome, 0)
        for block in blocks:
            counts[_block_outcome([outcomes[buffer.key] for buffer in block])] += 1
        return PutResult(counts[PutOutcome.STORED], counts[PutOutcome.EXISTS], counts[PutOutcome.FAILED], sum(stored))

    def probe(self, block_hashes: Sequence[BlockHash]) -> ProbeResult:
        """Which KV blocks are there for this rank, in every domain. Reads no content."""
        roles = self._roles.get(BlockType.KV, [])
        keys = [[self._keys[role].key(BlockType.KV, block_hash) for role in roles] for block_hash in block_hashes]
        asked = [key for block in keys for key in block]
        exists = {key for key, there in zip(asked, self._store.exists(asked), strict=False) if there} if asked else ()
        found = bytes(all(key in exists for key in block) for block in keys)
        return ProbeResult(found, self._store.state == CLOSED)

    def _to_replace(self, keys: Sequence[str]) -> Sequence[str]:
        """Keys to discard before they are put.

        A put that a failover of the masters interrupted leaves a key that is not there, is not to be read, and whose
        every further put "succeeds" without a trace.
        """
        again = [key for key in keys if key in self._tried and key not in self._suspects]
        exists = self._store.exists(again) if again else ()
        vanished = [key for key, there in zip(again, exists, strict=False) if not there]
        return [key for key in keys if key in self._suspects] + vanished

    def _expand(self, block_type: BlockType, block_hash: BlockHash, slot: HostSlot) -> tuple[StoreBuffer, ...]:
        """The objects of one logical block; none = it cannot be one of ours."""
        buffers: list[StoreBuffer] = []
        for role in self._roles.get(block_type, ()):
            region = self._arena.regions[role, block_type]
            if not 0 < slot < region.num_slots:
                return ()
            address = self._arena.slot_address(role, block_type, slot)
            key = self._keys[role].key(block_type, block_hash)
            buffers.append(StoreBuffer(key, address, region.layout.object_bytes))
        return tuple(buffers)

    def _fetch(self, blocks: Sequence[tuple[StoreBuffer, ...]], buffers: Sequence[StoreBuffer]) -> PrefetchResult:
        whole: set[str] = set()
        faults = corrupt = 0
        outcomes = list(self._store.get(buffers)) if buffers else []
        outcomes += [GetOutcome.FAULT] * (len(buffers) - len(outcomes))
        for buffer, outcome in zip(buffers, outcomes, strict=False):
            if outcome is GetOutcome.FAULT:
                faults += 1
                self._suspects.add(buffer.key)
            elif outcome is GetOutcome.HIT and self._is_whole(buffer):
                whole.add(buffer.key)
            elif outcome is GetOutcome.HIT:
                corrupt += 1
                self._quarantine.add(buffer.key)
                self._suspects.add(buffer.key)
        if len(self._suspects):
            for key in whole:  # another engine replaced it, or the store was only slow: there is nothing to heal
                self._suspects.release(key)
        hits = [bool(block) and all(buffer.key in whole for buffer in block) for block in blocks]
        num_bytes = sum(buffer.nbytes for block, hit in zip(blocks, hits, strict=True) if hit for buffer in block)
        return PrefetchResult(bytes(hits), num_bytes, faults, corrupt)

    def _is_whole(self, buffer: StoreBuffer) -> bool:
        return not self._verify or trailer_is_valid(buffer.address, buffer.nbytes - TRAILER_BYTES, buffer.key)


def _has_duplicates(buffers: Sequence[StoreBuffer]) -> bool:
    keys = {buffer.key for buffer in buffers}
    addresses = {buffer.address for buffer in buffers}
    return len(keys) < len(buffers) or len(addresses) < len(buffers)


def _block_outcome(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    if not outcomes or PutOutcome.FAILED in outcomes:
        return PutOutcome.FAILED
    return PutOutcome.STORED if PutOutcome.STORED in outcomes else PutOutcome.EXISTS
