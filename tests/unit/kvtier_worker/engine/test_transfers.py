"""The transfer object as a whole: what is registered, a block's way through the tiers and back, the end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import pytest
from kvtier_worker.core.ids import BatchId, BlockType, CacheRole
from kvtier_worker.engine.ports import GetOutcome, StoreBuffer
from kvtier_worker.engine.store_objects import PutResult
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions, first_layer_alone
from kvtier_worker.errors import ConfigError, TransferFailed
from kvtier_worker.testing.blocks import block_hash, domain, random_block, read_block
from kvtier_worker.testing.copy import BytesArenaMemory, BytesDeviceCache
from kvtier_worker.testing.store import MemoryBackend, MemoryStore
from kvtier_worker.testing.transfer_worker import BLOCKS, DRAFT, Outcome, Worker, writeback_plan

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


# through the tiers


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
