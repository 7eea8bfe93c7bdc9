"""Device -> host -> store -> host -> device between two workers, over every store, with the CPU copy engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from kvtier_worker.adapters.cpu_copy import CpuCopyEngine
from kvtier_worker.core.ids import BatchId, BlockHash, BlockId, BlockType, DType, HostSlot, JobId
from kvtier_worker.core.plans import PrefetchItem, RestoreItem, RestorePlan, WritebackItem, WritebackPlan
from kvtier_worker.engine.ports import KVCacheStore
from kvtier_worker.engine.store_objects import PutResult
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.writeback_pipeline import StoreResult
from kvtier_worker.testing.blocks import domain, kv_objects, random_block, read_block, write_block
from kvtier_worker.testing.copy import BytesDeviceCache
from kvtier_worker.testing.store_worlds import World, faulty_world, memory_world, mooncake_world, unique

LAYERS = 6
LAYOUT = domain(kv_objects(LAYERS, block_size=32, heads=4, head_dim=32, dtype=DType.BFLOAT16))
OBJECTS = LAYOUT.objects[BlockType.KV]
SLOTS, BLOCKS, MOVED = 24, 24, 20
WORLDS: dict[str, Callable[[], AbstractContextManager[World]]] = {
    "memory": memory_world,
    "faulty": faulty_world,
    "mooncake-tcp": lambda: mooncake_world(shared_memory=False),
    "mooncake-shm": lambda: mooncake_world(shared_memory=True),
}


class StoreMemory:
    """Arena memory from the store, as a worker takes it."""

    def __init__(self, store: KVCacheStore) -> None:
        self._store = store

    def allocate(self, nbytes: int) -> int:
        return self._store.allocate(nbytes)

    def free(self) -> None:
        """The store's own."""


class Worker:
    def __init__(self, store: KVCacheStore, model_id: str) -> None:
        self.cache = BytesDeviceCache(LAYOUT, BLOCKS)
        self.transfer = HierarchyKVCacheTransfer(
            TransferOptions(model_id, SLOTS),
            copy_engine=lambda arena, _: CpuCopyEngine(arena, [self.cache]),
            memory=StoreMemory(store),
            store=store,
        )
        self.transfer.register_cache(self.cache)
        self.transfer.finalize_registration()

    def write_back(self) -> PutResult:
        """Blocks 1… to slots 1…, under their numbers as hashes."""
        done = threading.Event()
        results: list[StoreResult] = []
        items = tuple(
            WritebackItem(BlockId(number), HostSlot(number), hash_of(number)) for number in range(1, MOVED + 1)
        )

        def on_stored(result: StoreResult) -> None:
            results.append(result)
            done.set()

        self.transfer.writeback(WritebackPlan(JobId(1), items), lambda _: None, on_stored)
        assert done.wait(20)
        return results[0].put

    def prefetch(self, numbers: range) -> bytes:
        """Into slots in reverse, so that nothing fits by luck."""
        items = [PrefetchItem(HostSlot(SLOTS - number), hash_of(number)) for number in numbers]
        return self.transfer.prefetch(items).hits

    def restore(self, numbers: range) -> None:
        items = tuple(RestoreItem(HostSlot(SLOTS - number), BlockId(number)) for number in numbers)
        self.transfer.restore(RestorePlan(BatchId(1), items))
        gate = self.transfer.take(BatchId(1), expected=True)
        assert gate is not None
        for layer in range(LAYERS):
            gate.wait(layer)
        gate.finish()


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


@pytest.fixture(
    scope="module",
    params=[
        "memory",
        "faulty",
        pytest.param("mooncake-tcp", marks=pytest.mark.mooncake),
        pytest.param("mooncake-shm", marks=pytest.mark.mooncake),
    ],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with WORLDS[request.param]() as one:
        yield one


@pytest.fixture
def make_worker(world: World) -> Iterator[Callable[[str], Worker]]:
    made: list[Worker] = []

    def make(model_id: str) -> Worker:
        made.append(Worker(world.open_store(), model_id))
        return made[-1]

    yield make
    for worker in made:
        worker.transfer.shutdown()


def test_what_one_worker_writes_back_another_one_restores_to_the_bit(make_worker: Callable[[str], Worker]) -> None:
    model_id = unique("a:model")
    writer, reader = make_worker(model_id), make_worker(model_id)
    numbers = range(1, MOVED + 1)
    for number in numbers:
        write_block(writer.cache, number, random_block(OBJECTS, number))
    assert writer.write_back().num_stored == MOVED
    assert writer.write_back().num_existing == MOVED
    probed = reader.transfer.probe([hash_of(number) for number in (*numbers, 99)])
    assert (probed.exists, probed.available) == (b"\1" * MOVED + b"\0", True)
    assert reader.prefetch(range(1, MOVED + 2)) == b"\1" * MOVED + b"\0"
    reader.restore(numbers)
    for number in numbers:
        assert read_block(reader.cache, number) == random_block(OBJECTS, number)
    assert reader.transfer.check_integrity() == []


def test_another_model_sees_nothing(make_worker: Callable[[str], Worker]) -> None:
    make_worker(unique("model")).write_back()
    assert make_worker(unique("model")).prefetch(range(1, 3)) == b"\0\0"
