"""The CUDA copy engine against the CPU path: the same bytes, the same order, the same failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from kvtier_worker.adapters.cpu_copy import BlockCopies
from kvtier_worker.adapters.cuda_copy import CudaCopyEngine
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, CacheRole, DType, HostSlot, JobId
from kvtier_worker.core.layout import ObjectLayout, layer_ranges
from kvtier_worker.core.plans import RestoreItem, RestorePlan, WritebackItem, WritebackPlan
from kvtier_worker.engine.arena import HostArena, arena_bytes, bind_arena, plan_regions
from kvtier_worker.engine.ports import CopyStream
from kvtier_worker.engine.synchronizer import LayerSynchronizer
from kvtier_worker.engine.trailers import trailer_is_valid
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.writeback_pipeline import CopyResult, StoreResult
from kvtier_worker.errors import TransferFailed
from kvtier_worker.machine.memory import PageMemory, allocate_pages
from kvtier_worker.testing.blocks import (
    block_hash,
    domain,
    indexed_objects,
    job,
    kv_objects,
    random_block,
    read_slot,
    write_slot,
)

pytestmark = pytest.mark.gpu
TARGET = CacheRole.TARGET
SLOTS, BLOCKS = 12, 16
LAYOUTS = {
    "float32": kv_objects(num_layers=6, block_size=16, heads=4, head_dim=32),
    "bfloat16": kv_objects(num_layers=5, block_size=16, heads=3, head_dim=10, dtype=DType.BFLOAT16),
    "bytes": kv_objects(num_layers=3, block_size=3, heads=1, head_dim=5, dtype=DType.UINT8),
    "index-and-scale": indexed_objects(4),
}
PAIRS = [(1, 9), (2, 3), (11, 15), (7, 1)]


@dataclass
class World:
    engine: CudaCopyEngine
    arena: HostArena
    cache: TorchDeviceCache
    layout: ObjectLayout
    pages: PageMemory

    def device_bytes(self) -> torch.Tensor:
        return self.cache.flat(BlockType.KV).cpu()


@pytest.fixture(params=LAYOUTS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    objects = LAYOUTS[request.param]
    layout = domain(objects)
    regions = plan_regions([layout], SLOTS)
    pages = allocate_pages(arena_bytes(regions))
    arena = bind_arena(pages.address, regions)
    device = torch.device("cuda", 0)
    cache = TorchDeviceCache(layout, BLOCKS, device)
    engine = CudaCopyEngine(arena, [cache], device)
    yield World(engine, arena, cache, objects, pages)
    engine.close()
    assert pages.nbytes >= arena.nbytes


def cpu_twin(world: World) -> tuple[BlockCopies, TorchDeviceCache]:
    """The CPU path over the same arena and a cache of its own."""
    twin = TorchDeviceCache(world.cache.layout, BLOCKS, torch.device("cpu"))
    return BlockCopies(world.arena, [twin]), twin


def fill_slots(world: World) -> None:
    for slot, _ in PAIRS:
        write_slot(world.arena, slot, random_block(world.layout, slot), TARGET)


@pytest.mark.parametrize("num_copies", [0, 1, 3])
def test_a_restore_leaves_the_same_bytes_as_on_cpu(world: World, num_copies: int) -> None:
    fill_slots(world)
    copies, twin = cpu_twin(world)
    stream = world.engine.stream()
    for start, stop in layer_ranges(world.layout.num_layers, num_copies):
        stream.restore(job(PAIRS), start, stop)
        copies.restore(job(PAIRS), start, stop)
    stream.synchronize()
    assert torch.equal(world.device_bytes(), twin.flat(BlockType.KV))


def test_a_writeback_leaves_the_same_bytes_and_trailers_as_on_cpu(world: World) -> None:
    content = torch.randint(0, 256, world.cache.flat(BlockType.KV).shape, dtype=torch.uint8)
    world.cache.flat(BlockType.KV).copy_(content)
    copies, twin = cpu_twin(world)
    twin.flat(BlockType.KV).copy_(content)
    copies.writeback(job(PAIRS))
    expected = {slot: read_slot(world.arena, slot, TARGET) for slot, _ in PAIRS}
    for slot, _ in PAIRS:
        write_slot(world.arena, slot, bytes(world.layout.object_bytes), TARGET)  # the trailer too
    stream = world.engine.stream()
    stream.wait(world.engine.record_compute())
    stream.writeback(job(PAIRS))
    stream.record().synchronize()
    for slot, _ in PAIRS:
        assert read_slot(world.arena, slot, TARGET) == expected[slot]
        address = world.arena.slot_address(TARGET, BlockType.KV, HostSlot(slot))
        assert trailer_is_valid(address, world.layout.payload_bytes)


def test_compute_sees_a_layer_only_after_its_event(world: World) -> None:
    """The copy stream is kept busy first, so a missing wait would read zeros."""
    fill_slots(world)
    stream = world.engine.stream()
    delay(world.engine, stream)
    stream.restore(job(PAIRS), 0, world.layout.num_layers)
    world.engine.compute_waits(stream.record())
    seen = world.cache.flat(BlockType.KV).clone()
    _, twin = cpu_twin(world)
    BlockCopies(world.arena, [twin]).restore(job(PAIRS), 0, world.layout.num_layers)
    assert torch.equal(seen.cpu(), twin.flat(BlockType.KV))


def test_a_writeback_waits_for_the_compute_before_it(world: World) -> None:
    """A late kernel writes the blocks; a copy that did not wait would save zeros."""
    sleep_on_device()
    world.cache.flat(BlockType.KV).fill_(7)
    stream = world.engine.stream()
    stream.wait(world.engine.record_compute())
    stream.writeback(job(PAIRS))
    stream.synchronize()
    for slot, _ in PAIRS:
        assert read_slot(world.arena, slot, TARGET) == b"\7" * world.layout.payload_bytes


def test_submitting_copies_does_not_wait_for_them(world: World) -> None:
    fill_slots(world)
    stream = world.engine.stream()
    delay(world.engine, stream)
    stream.restore(job(PAIRS), 0, world.layout.num_layers)
    event = stream.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_a_finished_forward_leaves_the_host_slots_to_their_next_owner(world: World) -> None:
    """The forward only queued its work, as one that samples nothing does; late copies would restore the new content."""
    fill_slots(world)
    _, twin = cpu_twin(world)
    num_layers = world.layout.num_layers
    BlockCopies(world.arena, [twin]).restore(job(PAIRS), 0, num_layers)
    stream = world.engine.stream()
    delay(world.engine, stream)
    stream.restore(job(PAIRS), 0, num_layers)
    event = stream.record()
    gate = LayerSynchronizer(BatchId(1), world.engine, ((0, num_layers),), [event], None, lambda _: None)
    for layer in range(num_layers):
        gate.wait(layer)
    assert not event.query()
    gate.finish()
    assert event.query()
    for slot, _ in PAIRS:
        write_slot(world.arena, slot, bytes(world.layout.payload_bytes), TARGET)
    torch.cuda.synchronize()
    assert torch.equal(world.device_bytes(), twin.flat(BlockType.KV))


def test_a_failure_is_told_and_the_stream_is_usable_again(world: World) -> None:
    stream = world.engine.stream()
    stream.restore(job([(SLOTS + 1, 1)]), 0, 1)
    event = stream.record()
    with pytest.raises(TransferFailed):
        world.engine.compute_waits(event)
    with pytest.raises(TransferFailed):
        stream.synchronize()
    stream.restore(job([(1, 1)]), 0, 1)
    stream.synchronize()


def test_counters_know_bytes_and_seconds(world: World) -> None:
    stream = world.engine.stream()
    stream.restore(job(PAIRS), 0, world.layout.num_layers)
    stream.writeback(job(PAIRS))
    stream.synchronize()
    counters = world.engine.counters
    assert counters.restore_bytes == counters.writeback_bytes == len(PAIRS) * world.layout.payload_bytes
    assert counters.restore_s > 0
    assert counters.writeback_s > 0


def test_the_transfer_brings_blocks_back_to_the_bit(world: World) -> None:
    device = torch.device("cuda", 0)
    cache = TorchDeviceCache(world.cache.layout, BLOCKS, device)
    content = torch.randint(0, 256, cache.flat(BlockType.KV).shape, dtype=torch.uint8, device=device)
    cache.flat(BlockType.KV).copy_(content)
    memory = Pages()
    transfer = HierarchyKVCacheTransfer(
        TransferOptions("gpu", SLOTS, layer_copies=2),
        copy_engine=lambda arena, _: CudaCopyEngine(arena, [cache], device),
        memory=memory,
    )
    transfer.register_cache(cache)
    transfer.finalize_registration()
    results: list[CopyResult | StoreResult] = []
    items = tuple(WritebackItem(BlockId(block), HostSlot(slot), block_hash(slot)) for slot, block in PAIRS)
    transfer.writeback(WritebackPlan(JobId(1), items), results.append, results.append)
    transfer.restore(
        RestorePlan(BatchId(0), (RestoreItem(HostSlot(3), BlockId(2)),))
    )  # unrelated, on another stream at the same time
    run(transfer, 0, world.layout.num_layers)
    while len(results) < 2:
        torch.cuda.synchronize()
    cache.flat(BlockType.KV).zero_()
    transfer.restore(
        RestorePlan(BatchId(1), tuple(RestoreItem(HostSlot(slot), BlockId(block)) for slot, block in PAIRS))
    )
    run(transfer, 1, world.layout.num_layers)
    _, twin = cpu_twin(world)
    twin.flat(BlockType.KV).copy_(content)
    assert isinstance(results[0], CopyResult)
    assert results[0].count == len(PAIRS)
    kept = kept_bytes(twin, [block for _, block in PAIRS])
    assert torch.equal(kept_bytes(cache, [block for _, block in PAIRS]), kept)
    transfer.shutdown()
    assert memory.pages is None


class Pages:
    def __init__(self) -> None:
        self.pages: PageMemory | None = None

    def allocate(self, nbytes: int) -> int:
        self.pages = allocate_pages(nbytes)
        return self.pages.address

    def free(self) -> None:
        self.pages = None


def run(transfer: HierarchyKVCacheTransfer, batch: int, num_layers: int) -> None:
    gate = transfer.take(BatchId(batch), expected=True)
    assert gate is not None
    for layer in range(num_layers):
        gate.wait(layer)
    gate.finish()


def kept_bytes(cache: TorchDeviceCache, blocks: Sequence[int]) -> torch.Tensor:
    """The bytes of some blocks, gathered on the CPU."""
    host = TorchDeviceCache(cache.layout, cache.num_blocks, torch.device("cpu"))
    host.flat(BlockType.KV).copy_(cache.flat(BlockType.KV))
    layout = cache.layout
    regions = plan_regions([layout], cache.num_blocks)
    pages = allocate_pages(arena_bytes(regions))
    arena = bind_arena(pages.address, regions)
    BlockCopies(arena, [host]).writeback(job([(block, block) for block in blocks]))
    content = b"".join(read_slot(arena, block, TARGET) for block in blocks)
    assert pages.nbytes
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def delay(engine: CudaCopyEngine, stream: CopyStream) -> None:
    """Put a long kernel in front of what a stream does next."""
    sleep_on_device()
    stream.wait(engine.record_compute())


def sleep_on_device() -> None:
    """Keep the compute stream busy for a quarter of a second or so."""
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
