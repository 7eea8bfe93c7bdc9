"""One worker's transfer over the chaotic copy engine, and the plans that tests give it in plain numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_worker.adapters.cpu_copy import AddressableCache
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, CacheRole, HostSlot, JobId
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.core.plans import PrefetchItem, RestoreItem, RestorePlan, WritebackItem, WritebackPlan
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.ports import CopyEngine, DeviceCache, KVCacheStore
from kvtier_worker.engine.store_objects import PutResult
from kvtier_worker.engine.synchronizer import LayerSynchronizer
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.writeback_pipeline import CopyResult, StoreResult
from kvtier_worker.testing.blocks import block_hash, domain, kv_objects, random_block, read_block, write_block
from kvtier_worker.testing.copy import BytesArenaMemory, BytesDeviceCache, ChaosCopyEngine, CopyFaults

SLOTS, BLOCKS = 8, 10
DRAFT = domain(kv_objects(num_layers=2), CacheRole.DRAFT, "spec_draft::mtp::embedded")
_PATIENCE_S = 10.0


@dataclass
class Outcome:
    """Collects the two callbacks of one write-back.

    Attributes:
        order: which callbacks came.
        copied: what the first one said.
        stored: what the second one said.
        done: set with the second one.
    """

    order: list[str] = field(default_factory=list)
    copied: CopyResult | None = None
    stored: StoreResult | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_copied(self, result: CopyResult) -> None:
        """The first callback."""
        self.order.append("copied")
        self.copied = result

    def on_stored(self, result: StoreResult) -> None:
        """The second callback."""
        self.order.append("stored")
        self.stored = result
        self.done.set()

    def wait(self) -> tuple[CopyResult, PutResult]:
        """Both results.

        Raises:
            AssertionError: a callback did not come, came twice or in the wrong order.
        """
        assert self.done.wait(_PATIENCE_S), "the write-back was never answered"
        assert self.order == ["copied", "stored"]
        assert self.copied is not None
        assert self.stored is not None
        return self.copied, self.stored.put


class Worker:
    """One worker's transfer, its caches and what it was built from.

    Args:
        store: None = no store tier.
        domains: what is registered, in order.
        faults: of the copies.
        seed: of the order of copies.
        options: None = `SLOTS` host slots and two ranges of layers.
        clock: of the transfer.
        device_waits: see `ChaosCopyEngine`.
    """

    def __init__(
        self,
        store: KVCacheStore | None = None,
        domains: Sequence[DomainLayout] = (domain(),),
        *,
        faults: CopyFaults | None = None,
        seed: int = 0,
        options: TransferOptions | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        device_waits: bool = False,
    ) -> None:
        self.memory = BytesArenaMemory()
        self.caches = {layout.role: BytesDeviceCache(layout, BLOCKS) for layout in domains}
        self.faults, self.seed, self.device_waits = faults, seed, device_waits
        self.transfer = HierarchyKVCacheTransfer(
            options or TransferOptions("model", SLOTS, layer_copies=2),
            copy_engine=self.build_engine,
            memory=self.memory,
            store=store,
            clock=clock,
        )
        for cache in self.caches.values():
            self.transfer.register_cache(cache)
        self.transfer.finalize_registration()

    def build_engine(self, arena: HostArena, caches: Sequence[DeviceCache]) -> CopyEngine:
        """The copy engine of the transfer, which calls this once."""
        self.arena = arena
        addressable: list[AddressableCache] = [self.caches[cache.layout.role] for cache in caches]
        self.engine = ChaosCopyEngine(arena, addressable, self.seed, self.faults, device_waits=self.device_waits)
        return self.engine

    @property
    def cache(self) -> BytesDeviceCache:
        """The target's."""
        return self.caches[CacheRole.TARGET]

    def fill(self, block: int, seed: int) -> None:
        """Write a device block in every cache, with content that no other seed gives."""
        for cache in self.caches.values():
            write_block(cache, block, random_block(cache.layout.objects[BlockType.KV], seed))

    def holds(self, block: int, seed: int) -> bool:
        """Whether a device block is in every cache as `fill` with this seed leaves it."""
        return all(
            read_block(cache, block) == random_block(cache.layout.objects[BlockType.KV], seed)
            for cache in self.caches.values()
        )

    def write_back(self, *items: tuple[int, int, int], job: int = 1) -> tuple[CopyResult, PutResult]:
        """Write back and wait.

        Args:
            items: see `writeback_plan`.
            job: its number.

        Raises:
            AssertionError: it was not answered as promised.
            TransferFailed: it was refused.
        """
        outcome = Outcome()
        self.transfer.writeback(writeback_plan(*items, job=job), outcome.on_copied, outcome.on_stored)
        return outcome.wait()

    def restore(self, batch: int, *items: tuple[int, int]) -> int:
        """Register a restore.

        Args:
            batch: the forward that it is for.
            items: see `restore_plan`.

        Raises:
            ProtocolError: the batch has one.
            TransferFailed: it was refused.
        """
        return self.transfer.restore(restore_plan(batch, *items))

    def run(self, batch: int, *, num_layers: int = 4) -> None:
        """A forward that waits at every layer.

        Raises:
            TransferFailed: its restore is missing or failed.
        """
        gate = self.transfer.take(BatchId(batch), expected=True)
        assert isinstance(gate, LayerSynchronizer)
        for layer in range(num_layers):
            gate.wait(layer)
        gate.wait_draft()
        gate.finish()

    def prefetch(self, *items: tuple[int, int]) -> bytes:
        """The hits, a byte each; for ``items`` see `prefetch_items`."""
        return self.transfer.prefetch(prefetch_items(*items)).hits


def restore_plan(batch: int, *items: tuple[int, int]) -> RestorePlan:
    """A restore of (host slot, device block)."""
    return RestorePlan(BatchId(batch), tuple(RestoreItem(HostSlot(slot), BlockId(block)) for slot, block in items))


def writeback_plan(*items: tuple[int, int, int], job: int = 1) -> WritebackPlan:
    """A write-back of (device block, host slot, hash number)."""
    return WritebackPlan(
        JobId(job),
        tuple(WritebackItem(BlockId(block), HostSlot(slot), block_hash(number)) for block, slot, number in items),
    )


def prefetch_items(*items: tuple[int, int]) -> list[PrefetchItem]:
    """A prefetch of (host slot, hash number)."""
    return [PrefetchItem(HostSlot(slot), block_hash(number)) for slot, number in items]


def raises(error: Exception) -> Callable[..., None]:
    """Stands in for any function and raises ``error``."""

    def fail(*_: object) -> None:
        raise error

    return fail
