"""The transfer object over the chaotic copy engine and the memory store: every tier, every fault."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from kvtier_worker.adapters.cpu_copy import AddressableCache
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, CacheRole, HostSlot, JobId, Rank
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.core.plans import (
    PrefetchItem,
    RestoreItem,
    RestorePlan,
    WritebackItem,
    WritebackPlan,
)
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.ports import (
    CopyEngine,
    DeviceCache,
    GetOutcome,
    KVCacheStore,
    LayerGate,
    PutOutcome,
    StoreBuffer,
)
from kvtier_worker.engine.store_objects import PutResult
from kvtier_worker.engine.synchronizer import LayerSynchronizer
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions, first_layer_alone
from kvtier_worker.engine.writeback_pipeline import CopyResult, StoreResult
from kvtier_worker.errors import ConfigError, ProtocolError, TransferFailed
from kvtier_worker.testing.blocks import block_hash, domain, kv_objects, random_block, read_block, write_block
from kvtier_worker.testing.copy import BytesArenaMemory, BytesDeviceCache, ChaosCopyEngine, CopyFaults
from kvtier_worker.testing.faulty_store import FaultProfile, FaultyStore
from kvtier_worker.testing.store import MemoryBackend, MemoryStore

SLOTS, BLOCKS = 8, 10
DRAFT = domain(kv_objects(num_layers=2), CacheRole.DRAFT, "spec_draft::mtp::embedded")


@dataclass
class Outcome:
    """Collects the two callbacks of one write-back."""

    order: list[str] = field(default_factory=list)
    copied: CopyResult | None = None
    stored: StoreResult | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_copied(self, result: CopyResult) -> None:
        self.order.append("copied")
        self.copied = result

    def on_stored(self, result: StoreResult) -> None:
        self.order.append("stored")
        self.stored = result
        self.done.set()

    def wait(self) -> tuple[CopyResult, PutResult]:
        assert self.done.wait(10), "the write-back was never answered"
        assert self.order == ["copied", "stored"]
        assert self.copied is not None
        assert self.stored is not None
        return self.copied, self.stored.put


class Worker:
    """One worker's transfer, its caches and what it was built from."""

    def __init__(
        self,
        store: KVCacheStore | None = None,
        domains: Sequence[DomainLayout] = (domain(),),
        *,
        faults: CopyFaults | None = None,
        seed: int = 0,
        options: TransferOptions | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.memory = BytesArenaMemory()
        self.caches = {layout.role: BytesDeviceCache(layout, BLOCKS) for layout in domains}
        self.faults, self.seed = faults, seed
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
        self.arena = arena
        addressable: list[AddressableCache] = [self.caches[cache.layout.role] for cache in caches]
        self.engine = ChaosCopyEngine(arena, addressable, self.seed, self.faults)
        return self.engine

    @property
    def cache(self) -> BytesDeviceCache:
        return self.caches[CacheRole.TARGET]

    def fill(self, block: int, seed: int) -> None:
        for cache in self.caches.values():
            write_block(cache, block, random_block(cache.layout.objects[BlockType.KV], seed))

    def holds(self, block: int, seed: int) -> bool:
        return all(
            read_block(cache, block) == random_block(cache.layout.objects[BlockType.KV], seed)
            for cache in self.caches.values()
        )

    def write_back(self, *items: tuple[int, int, int], job: int = 1) -> tuple[CopyResult, PutResult]:
        """(device block, host slot, hash number)."""
        outcome = Outcome()
        self.transfer.writeback(writeback_plan(*items, job=job), outcome.on_copied, outcome.on_stored)
        return outcome.wait()

    def restore(self, batch: int, *items: tuple[int, int]) -> int:
        """(host slot, device block)."""
        return self.transfer.restore(restore_plan(batch, *items))

    def run(self, batch: int, *, num_layers: int = 4) -> None:
        """A forward that waits at every layer."""
        gate = self.transfer.take(BatchId(batch), expected=True)
        assert isinstance(gate, LayerSynchronizer)
        for layer in range(num_layers):
            gate.wait(layer)
        gate.wait_draft()
        gate.finish()

    def prefetch(self, *items: tuple[int, int]) -> bytes:
        """(host slot, hash number)."""
        return self.transfer.prefetch(prefetch_items(*items)).hits


def restore_plan(batch: int, *items: tuple[int, int]) -> RestorePlan:
    return RestorePlan(BatchId(batch), tuple(RestoreItem(HostSlot(slot), BlockId(block)) for slot, block in items))


def writeback_plan(*items: tuple[int, int, int], job: int = 1) -> WritebackPlan:
    return WritebackPlan(
        JobId(job),
        tuple(WritebackItem(BlockId(block), HostSlot(slot), block_hash(number)) for block, slot, number in items),
    )


def prefetch_items(*items: tuple[int, int]) -> list[PrefetchItem]:
    return [PrefetchItem(HostSlot(slot), block_hash(number)) for slot, number in items]


def wait_for_every_layer(gate: LayerGate) -> None:
    for layer in range(4):
        gate.wait(layer)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# registration


def test_a_domain_is_registered_once() -> None:
    transfer = Worker().transfer
    with pytest.raises(ConfigError) as caught:
        transfer.register_cache(BytesDeviceCache(domain(), BLOCKS))
    assert any("final" in text for text in caught.value.violations)
    assert any("twice" in text for text in caught.value.violations)


def test_two_domains_cannot_share_a_key_component() -> None:
    with pytest.raises(ConfigError, match="share 'main'"):
        Worker(domains=(domain(), domain(role=CacheRole.DRAFT)))


def test_registration_needs_a_target_and_ends_once() -> None:
    with pytest.raises(ConfigError, match="draft"):
        Worker(domains=(DRAFT,))
    with pytest.raises(ConfigError, match="final"):
        Worker().transfer.finalize_registration()


def test_handles_count_in_registration_order() -> None:
    transfer = HierarchyKVCacheTransfer(
        TransferOptions("model", 0), copy_engine=Worker().build_engine, memory=BytesArenaMemory()
    )
    assert transfer.register_cache(BytesDeviceCache(domain(), BLOCKS)) == 0
    assert transfer.register_cache(BytesDeviceCache(DRAFT, BLOCKS)) == 1


def test_without_host_slots_nothing_is_built_and_nothing_moves() -> None:
    worker = Worker(MemoryStore(), options=TransferOptions("model", 0))
    assert worker.transfer.arena_bytes == 0
    assert worker.prefetch((1, 1)) == b"\0"
    with pytest.raises(TransferFailed, match="no host tier"):
        worker.restore(1, (1, 1))


# device -> host -> device


def test_a_block_comes_back_from_the_host_after_its_layers_were_waited_for() -> None:
    worker = Worker()
    worker.fill(3, seed=1)
    copied, put = worker.write_back((3, 5, 1))
    assert (copied.count, copied.error) == (1, "")
    assert put == PutResult(), "no store"
    assert worker.restore(7, (5, 4), (5, 6)) == 2
    worker.run(7)
    assert worker.holds(4, seed=1)
    assert worker.holds(6, seed=1)
    assert worker.transfer.check_integrity() == []


@pytest.mark.parametrize("seed", range(5))
def test_the_gate_opens_at_the_start_of_each_range_and_not_before_its_copies(seed: int) -> None:
    worker = Worker(seed=seed)
    worker.fill(3, seed=1)
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    expected = random_block(worker.cache.layout.objects[BlockType.KV], 1)
    layer = worker.cache.layout.objects[BlockType.KV].layer_bytes
    assert read_block(worker.cache, 4) == bytes(len(expected)), "nothing is copied before somebody waits"
    gate = worker.transfer.take(BatchId(1), expected=True)
    assert gate is not None
    gate.wait(0)
    assert read_block(worker.cache, 4)[:layer] == expected[:layer]
    gate.wait(1)
    assert read_block(worker.cache, 4)[: 2 * layer] == expected[: 2 * layer]
    gate.wait(2)
    assert read_block(worker.cache, 4) == expected
    gate.wait(3)
    gate.finish()


def test_the_first_layer_travels_alone_unless_everything_travels_at_once() -> None:
    assert first_layer_alone(((0, 7), (7, 14))) == ((0, 1), (1, 7), (7, 14))
    assert first_layer_alone(((0, 1), (1, 2))) == ((0, 1), (1, 2))
    assert first_layer_alone(((0, 7),)) == ((0, 7),)


def test_a_forward_that_never_waited_is_worthless() -> None:
    worker = Worker()
    worker.restore(1, (5, 4))
    gate = worker.transfer.take(BatchId(1), expected=True)
    assert gate is not None
    gate.wait(0)
    with pytest.raises(TransferFailed, match=r"never waited for layers \[\(1, 2\), \(2, 4\)\]"):
        gate.finish()
    assert worker.transfer.check_integrity() == []


def test_a_missing_restore_stops_the_forward() -> None:
    with pytest.raises(TransferFailed, match="never registered"):
        Worker().transfer.take(BatchId(3), expected=True)


def test_an_unannounced_restore_stops_the_forward() -> None:
    worker = Worker()
    worker.restore(3, (1, 1))
    with pytest.raises(TransferFailed, match="not announced"):
        worker.transfer.take(BatchId(3), expected=False)
    assert worker.transfer.check_integrity() == []


def test_a_batch_without_restores_has_no_gate() -> None:
    assert Worker().transfer.take(BatchId(3), expected=False) is None


def test_a_restore_is_registered_once() -> None:
    worker = Worker()
    worker.restore(3, (1, 1))
    with pytest.raises(ProtocolError, match="twice"):
        worker.restore(3, (2, 2))
    worker.run(3)


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ((), "empty"),
        (((0, 1),), "host slot 0"),
        (((SLOTS, 1),), f"host slot {SLOTS}"),
        (((1, 0),), "device block 0"),
        (((1, BLOCKS),), f"device block {BLOCKS}"),
        (((1, 4), (2, 4)), "device block 4 twice"),
    ],
)
def test_an_impossible_restore_is_refused_with_its_reason(items: tuple[tuple[int, int], ...], complaint: str) -> None:
    worker = Worker()
    with pytest.raises(TransferFailed, match=complaint):
        worker.restore(1, *items)
    with pytest.raises(TransferFailed, match="never registered"):
        worker.transfer.take(BatchId(1), expected=True)
    assert worker.transfer.check_integrity() == []


def test_a_type_that_no_domain_owns_is_refused() -> None:
    plan = RestorePlan(BatchId(1), (RestoreItem(HostSlot(1), BlockId(1), BlockType.LINEAR),))
    with pytest.raises(TransferFailed, match="LINEAR"):
        Worker().transfer.restore(plan)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_copy_fails_the_forward_and_the_next_batch_is_sound(failing: int) -> None:
    worker = Worker(faults=CopyFaults(restores=frozenset({failing})))
    worker.fill(3, seed=1)
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    gate = worker.transfer.take(BatchId(1), expected=True)
    assert gate is not None
    with pytest.raises(TransferFailed, match="fails as planned"):
        wait_for_every_layer(gate)
    gate.abandon("the forward failed")
    assert worker.transfer.check_integrity() == []
    worker.restore(2, (5, 4))
    worker.run(2)
    assert worker.holds(4, seed=1)


def test_with_several_ranks_a_failed_wait_is_held_back_until_the_forward_ends() -> None:
    """Raising in the middle would leave the other ranks alone in a collective."""
    worker = Worker(
        faults=CopyFaults(restores=frozenset({0})), options=TransferOptions("model", SLOTS, tp_size=2, layer_copies=2)
    )
    worker.restore(1, (5, 4))
    gate = worker.transfer.take(BatchId(1), expected=True)
    assert gate is not None
    for layer in range(4):
        gate.wait(layer)
    assert gate.failed
    with pytest.raises(TransferFailed, match="fails as planned"):
        gate.finish()
    missing = worker.transfer.take(BatchId(2), expected=True)
    assert missing is not None
    missing.wait(0)
    with pytest.raises(TransferFailed, match="never registered"):
        missing.finish()


def test_a_restore_whose_forward_never_came_is_over_before_the_next_forward_computes() -> None:
    """Its destination may belong to somebody else by then."""
    worker = Worker()
    worker.fill(3, seed=1)
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    worker.fill(4, seed=2)
    assert worker.transfer.take(BatchId(2), expected=False) is None
    worker.fill(4, seed=3)
    worker.transfer.shutdown()
    assert worker.holds(4, seed=3)


@pytest.mark.parametrize("seed", range(8))
def test_restores_into_the_same_block_happen_in_order_of_registration(seed: int) -> None:
    """The first batch is never run, its block is given to the second: the late copy of the first must not win."""
    worker = Worker(seed=seed)
    for block in (1, 2):
        worker.fill(block, seed=block)
    worker.write_back((1, 1, 1), (2, 2, 2))
    worker.restore(1, (1, 5))
    worker.restore(2, (2, 5))
    worker.run(2)
    assert worker.holds(5, seed=2)


@pytest.mark.parametrize("seed", range(8))
def test_a_restore_leaves_its_block_alone_until_compute_is_done_with_it(seed: int) -> None:
    """A kernel submitted before the restore still reads the block's last owner's content."""
    worker = Worker(seed=seed)
    worker.fill(1, seed=1)
    worker.write_back((1, 1, 1))
    worker.fill(5, seed=2)
    right: list[bool] = []
    worker.engine.submit_compute(lambda: right.append(worker.holds(5, seed=2)))
    worker.restore(1, (1, 5))
    worker.run(1)
    assert worker.holds(5, seed=1)
    assert right == [True]


@pytest.mark.parametrize("seed", range(8))
def test_a_writeback_takes_what_late_compute_wrote(seed: int) -> None:
    worker = Worker(seed=seed)
    worker.engine.submit_compute(lambda: worker.fill(3, seed=1))
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    worker.run(1)
    assert worker.holds(4, seed=1)


def test_more_restores_than_streams_are_refused_and_later_accepted() -> None:
    worker = Worker(options=TransferOptions("model", SLOTS, num_streams=2))
    worker.restore(1, (1, 1))
    worker.restore(2, (1, 2))
    with pytest.raises(TransferFailed, match="all 2 copy streams"):
        worker.restore(3, (1, 3))
    worker.run(1)
    worker.restore(3, (1, 3))


def test_a_draft_is_restored_after_the_target_under_one_batch() -> None:
    worker = Worker(domains=(domain(), DRAFT))
    worker.fill(3, seed=1)
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    worker.run(1)
    assert worker.holds(4, seed=1)
    restores = [line for line in worker.engine.log if line.startswith("restore")]
    assert restores == [
        "restore target [0, 1)",
        "restore target [1, 2)",
        "restore target [2, 4)",
        "restore draft [0, 2)",
    ]


# device -> host -> store


@pytest.mark.parametrize(
    ("items", "complaint"),
    [((), "empty"), (((1, 0, 1),), "host slot 0"), (((1, 2, 1), (2, 2, 2)), "names a host slot twice")],
)
def test_an_impossible_writeback_is_refused(items: tuple[tuple[int, int, int], ...], complaint: str) -> None:
    outcome = Outcome()
    with pytest.raises(TransferFailed, match=complaint):
        Worker().transfer.writeback(writeback_plan(*items), outcome.on_copied, outcome.on_stored)
    assert outcome.order == []


def test_a_failed_copy_is_a_count_of_zero_and_puts_nothing() -> None:
    backend = MemoryBackend()
    worker = Worker(MemoryStore(backend), faults=CopyFaults(writebacks=frozenset({0})))
    copied, put = worker.write_back((1, 1, 1), (2, 2, 2))
    assert copied.count == 0
    assert "fails as planned" in copied.error
    assert put.num_failed == 2
    assert backend.keys() == ()
    assert worker.write_back((1, 1, 1))[0].count == 1


@pytest.mark.parametrize("bad", [RuntimeError("device lost"), TransferFailed("device lost")])
def test_a_copy_that_cannot_even_be_queued_is_answered_and_leases_no_stream(
    bad: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(MemoryStore())
    with monkeypatch.context() as broken:
        broken.setattr(worker.engine, "stream", raises(bad))
        copied, put = worker.write_back((1, 1, 1))
    assert (copied.count, put.num_failed) == (0, 1)
    assert "device lost" in copied.error
    assert worker.transfer.check_integrity() == []
    assert worker.write_back((1, 1, 1))[0].count == 1


def test_a_store_that_raises_at_a_put_leaves_the_next_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    worker = Worker(store)
    with monkeypatch.context() as broken:
        broken.setattr(store, "put", raises(RuntimeError("a bug")))
        copied, put = worker.write_back((1, 1, 1))
    assert (copied.count, put.num_failed) == (1, 1)
    assert worker.write_back((1, 1, 1))[1].num_stored == 1


def test_a_restore_that_cannot_be_queued_gives_its_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    with monkeypatch.context() as broken:
        broken.setattr(worker.engine, "record_compute", raises(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            worker.restore(1, (1, 1))
    assert worker.transfer.check_integrity() == []
    worker.restore(2, (1, 1))
    worker.run(2)


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_what_one_worker_wrote_another_one_reads() -> None:
    backend = MemoryBackend()
    writer, reader = Worker(MemoryStore(backend)), Worker(MemoryStore(backend))
    writer.fill(1, seed=1)
    writer.fill(2, seed=2)
    copied, put = writer.write_back((1, 1, 1), (2, 2, 2))
    assert (copied.count, put.num_stored, put.num_existing, put.num_failed) == (2, 2, 0, 0)
    assert reader.prefetch((4, 2), (5, 9), (6, 1)) == bytes([1, 0, 1])
    reader.restore(1, (4, 7), (6, 8))
    reader.run(1)
    assert reader.holds(7, seed=2)
    assert reader.holds(8, seed=1)


def test_an_existing_object_is_left_alone_and_counts_apart() -> None:
    backend = MemoryBackend()
    worker = Worker(MemoryStore(backend))
    worker.fill(1, seed=1)
    worker.write_back((1, 1, 1))
    before = backend.read(backend.keys()[0])
    worker.fill(1, seed=2)
    _, put = worker.write_back((1, 2, 1))
    assert (put.num_stored, put.num_existing, put.num_bytes) == (0, 1, 0)
    assert backend.read(backend.keys()[0]) == before


def test_equal_keys_of_one_job_are_put_once() -> None:
    backend = MemoryBackend()
    worker = Worker(MemoryStore(backend))
    _, put = worker.write_back((1, 1, 1), (2, 2, 1))
    assert len(backend.keys()) == 1
    assert put.num_stored == 2
    assert put.num_bytes == worker.cache.layout.objects[BlockType.KV].object_bytes


def test_a_logical_block_is_one_object_per_domain() -> None:
    backend = MemoryBackend()
    worker = Worker(MemoryStore(backend), domains=(domain(), DRAFT))
    worker.fill(1, seed=1)
    worker.write_back((1, 1, 1), (2, 2, 2))
    assert len(backend.keys()) == 4
    assert worker.prefetch((3, 1), (4, 2)) == b"\1\1"


@pytest.mark.parametrize("component", ["main", "spec_draft"])
def test_a_block_whose_object_of_one_domain_is_gone_is_a_miss(component: str) -> None:
    backend = MemoryBackend()
    worker = Worker(MemoryStore(backend), domains=(domain(), DRAFT))
    worker.write_back((1, 1, 1), (2, 2, 2))
    gone = next(key for key in list(backend.keys()) if component in key and key.endswith(block_hash(1).hex()))
    backend.remove(gone)
    assert worker.prefetch((3, 1), (4, 2)) == b"\0\1"
    assert worker.transfer.probe([block_hash(1), block_hash(2)]).exists == b"\0\1"


@pytest.mark.parametrize("component", ["main", "spec_draft"])
def test_an_object_that_goes_between_exists_and_get_takes_its_block_along(component: str) -> None:
    class Vanishing(MemoryStore):
        def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
            outcomes = zip(buffers, super().get(buffers), strict=True)
            return [GetOutcome.MISS if component in buffer.key else outcome for buffer, outcome in outcomes]

    worker = Worker(Vanishing(), domains=(domain(), DRAFT))
    worker.write_back((1, 1, 1))
    assert worker.prefetch((3, 1)) == b"\0"


def test_a_latent_cache_is_written_by_rank_zero_only() -> None:
    for rank in (0, 1):
        backend = MemoryBackend()
        options = TransferOptions("model", SLOTS, tp_size=2, tp_rank=Rank(rank), mla=True)
        worker = Worker(MemoryStore(backend), options=options)
        copied, put = worker.write_back((1, 1, 1))
        assert copied.count == 1
        assert len(backend.keys()) == (1 if rank == 0 else 0)
        assert put.num_stored + put.num_existing == 1


def test_keys_of_ranks_and_models_differ() -> None:
    backend = MemoryBackend()
    for rank, model in ((0, "a"), (1, "a"), (0, "a:b")):
        options = TransferOptions(model, SLOTS, tp_size=2, tp_rank=Rank(rank))
        Worker(MemoryStore(backend), options=options).write_back((1, 1, 1))
    assert len(backend.keys()) == 3


# store -> host


class ListeningStore(MemoryStore):
    """Notes what is asked."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        super().__init__(backend)
        self.asked: list[str] = []

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        self.asked.append(f"exists {len(keys)}")
        return super().exists(keys)

    def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        self.asked.append(f"get {len(buffers)}")
        return super().get(buffers)

    def close(self) -> None:
        self.asked.append("close")
        super().close()


def test_existence_is_asked_first_and_only_whole_blocks_are_read() -> None:
    store = ListeningStore()
    worker = Worker(store)
    worker.write_back((1, 1, 1))
    worker.prefetch((2, 1), (3, 7))
    assert store.asked == ["exists 2", "get 1"]


def test_a_repeated_hash_or_slot_is_a_miss_of_everything_without_a_call() -> None:
    store = ListeningStore()
    worker = Worker(store)
    worker.write_back((1, 1, 1), (2, 2, 2))
    assert worker.prefetch((3, 1), (4, 1)) == b"\0\0"
    assert worker.prefetch((3, 1), (3, 2)) == b"\0\0"
    assert store.asked == []


def test_a_slot_out_of_range_is_a_miss_of_its_block_only() -> None:
    worker = Worker(MemoryStore())
    worker.write_back((1, 1, 1), (2, 2, 2))
    assert worker.prefetch((0, 1), (3, 2)) == b"\0\1"
    assert worker.prefetch((SLOTS, 1), (3, 2)) == b"\0\1"


def test_a_corrupt_object_is_a_miss_counted_and_left_alone_until_its_time_is_over() -> None:
    clock = Clock()
    inner = MemoryStore()
    store = FaultyStore(inner, FaultProfile(corrupt=1.0))
    worker = Worker(store, clock=clock, options=TransferOptions("model", SLOTS, quarantine_s=60.0))
    worker.write_back((1, 1, 1))
    result = worker.transfer.prefetch(prefetch_items((2, 1)))
    assert (result.hits, result.num_corrupt, result.num_bytes) == (b"\0", 1, 0)
    store.profile = FaultProfile()
    assert worker.prefetch((2, 1)) == b"\0", "quarantined"
    clock.now = 61.0
    assert worker.prefetch((2, 1)) == b"\1"


@pytest.mark.parametrize("profile", [FaultProfile(corrupt=1.0), FaultProfile(partial_get=1.0)])
def test_writing_a_key_that_could_not_be_read_replaces_its_object(profile: FaultProfile) -> None:
    backend = MemoryBackend()
    store = FaultyStore(MemoryStore(backend), profile)
    worker = Worker(store)
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\0"
    store.profile = FaultProfile()
    backend.replace(backend.keys()[0], b"rotten for good")
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\1"


def test_an_object_that_was_read_whole_again_is_left_alone() -> None:
    """Another engine has replaced it: removing its object would only hurt whoever reads that now."""
    backend = MemoryBackend()
    store = FaultyStore(MemoryStore(backend), FaultProfile(partial_get=1.0))
    worker = Worker(store)
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\0"
    store.profile = FaultProfile()
    assert worker.prefetch((2, 1)) == b"\1"
    before = backend.read(backend.keys()[0])
    worker.write_back((1, 5, 1))
    assert backend.read(backend.keys()[0]) == before


def test_an_object_whose_put_left_no_trace_is_freed_before_the_next_put() -> None:
    """As after a failover in the middle of a put: the key is not there, and every put of it "succeeds"."""

    class Stuck(MemoryStore):
        stuck = True

        def put(self, buffers: Sequence[StoreBuffer]) -> Sequence[PutOutcome]:
            return [PutOutcome.STORED] * len(buffers) if self.stuck else super().put(buffers)

        def discard(self, keys: Sequence[str]) -> None:
            self.stuck = False
            super().discard(keys)

    worker = Worker(Stuck())
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\0"
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\1"


def test_without_verification_no_object_is_ever_removed() -> None:
    """A reader at the same moment could get other bytes and would not notice."""
    backend = MemoryBackend()
    store = FaultyStore(MemoryStore(backend), FaultProfile(partial_get=1.0))
    worker = Worker(store, options=TransferOptions("model", SLOTS, verify=False))
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\0"
    before = backend.read(backend.keys()[0])
    worker.write_back((1, 5, 1))
    assert backend.read(backend.keys()[0]) == before


def test_without_verification_corruption_passes() -> None:
    """The flag does what it says; the test above would pass by luck otherwise."""
    store = FaultyStore(MemoryStore(), FaultProfile(corrupt=1.0))
    worker = Worker(store, options=TransferOptions("model", SLOTS, verify=False))
    worker.write_back((1, 1, 1))
    assert worker.prefetch((2, 1)) == b"\1"


@pytest.mark.parametrize(
    ("profile", "num_faults"),
    [
        (FaultProfile(partial_get=1.0), 1),
        (FaultProfile(vanish=1.0), 0),
        (FaultProfile(short_read=1.0), 0),
        (FaultProfile(lease_expiry=1.0), 1),
        (FaultProfile(hidden=1.0), 0),
        (FaultProfile(outages=((0, 99),)), 0),
    ],
)
def test_every_fault_of_the_store_is_a_miss(profile: FaultProfile, num_faults: int) -> None:
    backend = MemoryBackend()
    Worker(MemoryStore(backend)).write_back((1, 1, 1))
    result = Worker(FaultyStore(MemoryStore(backend), profile)).transfer.prefetch(prefetch_items((2, 1)))
    assert (result.hits, result.num_faults, result.num_corrupt) == (b"\0", num_faults, 0)


def test_an_object_of_another_length_is_a_miss() -> None:
    backend = MemoryBackend()
    Worker(MemoryStore(backend)).write_back((1, 1, 1))
    key = backend.keys()[0]
    content = backend.read(key)
    assert content is not None
    for wrong in (content[:-1], content + b"x", b""):
        backend.replace(key, wrong)
        assert Worker(MemoryStore(backend)).prefetch((2, 1)) == b"\0"


def test_the_whole_object_of_another_block_is_corrupt() -> None:
    """Memory that a store hands out again while it is read delivers exactly that."""
    backend = MemoryBackend()
    Worker(MemoryStore(backend)).write_back((1, 1, 1), (2, 2, 2))
    first, second = backend.keys()
    content = backend.read(second)
    assert content is not None
    backend.replace(first, content)
    results = [Worker(MemoryStore(backend)).transfer.prefetch(prefetch_items((3, number))) for number in (1, 2)]
    assert sorted((result.hits, result.num_corrupt) for result in results) == [(b"\0", 1), (b"\1", 0)]


def test_a_dead_store_is_said_to_be_unavailable() -> None:
    store = FaultyStore(MemoryStore())
    worker = Worker(store)
    assert worker.transfer.probe([block_hash(1)]).available
    store.dead = True
    assert not worker.transfer.probe([block_hash(1)]).available
    _, put = worker.write_back((1, 1, 1))
    assert put.num_failed == 1
    assert worker.transfer.stats().store_state == "open"


def test_stats_count_bytes_by_direction() -> None:
    worker = Worker(MemoryStore())
    payload = worker.cache.layout.objects[BlockType.KV].payload_bytes
    worker.write_back((1, 1, 1), (2, 2, 2))
    worker.restore(1, (1, 3))
    worker.run(1)
    stats = worker.transfer.stats()
    assert (stats.copies.writeback_bytes, stats.copies.restore_bytes) == (2 * payload, payload)
    assert stats.store_state == "closed"


# the end


def test_shutdown_drains_closes_the_store_and_only_then_frees_the_arena() -> None:
    store = ListeningStore()
    worker = Worker(store)
    order: list[str] = []
    free, close = worker.memory.free, store.close

    def note_free() -> None:
        order.append("free")
        free()

    def note_close() -> None:
        order.append("close")
        close()

    worker.memory.free = note_free  # type: ignore[method-assign]
    store.close = note_close  # type: ignore[method-assign]
    outcome = Outcome()
    worker.restore(1, (1, 1))
    worker.transfer.writeback(writeback_plan((2, 2, 2)), outcome.on_copied, outcome.on_stored)
    worker.transfer.shutdown()
    assert outcome.wait()[1].num_stored == 1
    assert order == ["close", "free"]
    worker.transfer.shutdown()
    assert order == ["close", "free"]


def test_after_shutdown_everything_is_a_miss_or_refused() -> None:
    worker = Worker(MemoryStore())
    worker.write_back((1, 1, 1))
    worker.transfer.shutdown()
    assert worker.prefetch((2, 1)) == b"\0"
    assert not worker.transfer.probe([block_hash(1)]).available
    with pytest.raises(TransferFailed):
        worker.restore(1, (1, 1))


def test_shutdown_waits_for_a_prefetch_that_is_inside_the_store() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class SlowStore(MemoryStore):
        def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
            inside.set()
            assert go_on.wait(10)
            ctypes.memset(buffers[0].address, 0x5A, 1)
            return super().get(buffers)

    worker = Worker(SlowStore())
    worker.write_back((1, 1, 1))
    hits: list[bytes] = []
    reading = threading.Thread(target=lambda: hits.append(worker.prefetch((2, 1))))
    reading.start()
    assert inside.wait(10)
    closing = threading.Thread(target=worker.transfer.shutdown)
    closing.start()
    assert not worker.memory.freed
    go_on.set()
    reading.join(10)
    closing.join(10)
    assert hits == [b"\1"]
    assert worker.memory.freed
