"""What every copy engine does, the chaotic one included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_worker.adapters.cpu_copy import AddressableCache, CpuCopyEngine
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.core.ids import BlockType, CacheRole, DType, HostSlot
from kvtier_worker.core.layout import DomainLayout, ObjectLayout, layer_ranges
from kvtier_worker.engine.arena import HostArena, arena_bytes, bind_arena, plan_regions
from kvtier_worker.engine.ports import CopyEngine
from kvtier_worker.engine.trailers import trailer_is_valid
from kvtier_worker.errors import TransferFailed
from kvtier_worker.testing.blocks import (
    domain,
    indexed_objects,
    job,
    kv_objects,
    random_block,
    read_block,
    read_slot,
    write_block,
    write_slot,
)
from kvtier_worker.testing.copy import BytesArenaMemory, BytesDeviceCache, ChaosCopyEngine, CopyFaults

TARGET = CacheRole.TARGET
SLOTS, BLOCKS = 6, 5


@dataclass
class World:
    engine: CopyEngine
    arena: HostArena
    cache: AddressableCache
    memory: BytesArenaMemory

    @property
    def layout(self) -> ObjectLayout:
        return self.cache.layout.objects[BlockType.KV]


def cpu_world(layout: DomainLayout) -> World:
    cache = TorchDeviceCache(layout, BLOCKS, torch.device("cpu"))
    memory, arena = make_arena(layout)
    return World(CpuCopyEngine(arena, [cache]), arena, cache, memory)


def chaos_world(layout: DomainLayout, seed: int = 1) -> World:
    cache = BytesDeviceCache(layout, BLOCKS)
    memory, arena = make_arena(layout)
    return World(ChaosCopyEngine(arena, [cache], seed), arena, cache, memory)


def make_arena(layout: DomainLayout) -> tuple[BytesArenaMemory, HostArena]:
    memory = BytesArenaMemory()
    regions = plan_regions([layout], SLOTS)
    return memory, bind_arena(memory.allocate(arena_bytes(regions)), regions)


WORLDS: dict[str, Callable[[DomainLayout], World]] = {"cpu": cpu_world, "chaos": chaos_world}


@pytest.fixture(params=WORLDS)
def make_world(request: pytest.FixtureRequest) -> Iterator[Callable[[DomainLayout], World]]:
    made: list[World] = []

    def make(layout: DomainLayout) -> World:
        made.append(WORLDS[request.param](layout))
        return made[-1]

    yield make
    for world in made:
        world.engine.close()


MakeWorld = Callable[[DomainLayout], World]


@pytest.mark.parametrize(
    "objects",
    [
        kv_objects(),
        kv_objects(num_layers=1),
        kv_objects(dtype=DType.BFLOAT16, heads=3, head_dim=5),
        indexed_objects(),
    ],
    ids=["float32", "one-layer", "bfloat16", "index-and-scale"],
)
def test_a_block_written_back_and_restored_is_the_same_to_the_bit(make_world: MakeWorld, objects: ObjectLayout) -> None:
    world = make_world(domain(objects))
    content = {block: random_block(objects, block) for block in (1, 2, 4)}
    for block, data in content.items():
        write_block(world.cache, block, data)
    stream = world.engine.stream()
    stream.writeback(job([(5, 1), (2, 2), (3, 4)]))
    stream.synchronize()
    assert read_slot(world.arena, 5, TARGET) == content[1]
    for block in content:
        write_block(world.cache, block, bytes(objects.payload_bytes))
    stream.restore(job([(5, 4), (2, 1), (3, 3)]), 0, objects.num_layers)
    stream.synchronize()
    assert read_block(world.cache, 4) == content[1]
    assert read_block(world.cache, 1) == content[2]
    assert read_block(world.cache, 3) == content[4]
    assert read_block(world.cache, 2) == bytes(objects.payload_bytes), "a block nobody named is untouched"
    assert read_block(world.cache, 0) == bytes(objects.payload_bytes), "so is padding"


def test_a_writeback_ends_with_a_trailer_that_matches(make_world: MakeWorld) -> None:
    world = make_world(domain())
    write_block(world.cache, 3, random_block(world.layout, 9))
    stream = world.engine.stream()
    stream.writeback(job([(1, 3)]))
    stream.record().synchronize()
    address = world.arena.slot_address(TARGET, BlockType.KV, HostSlot(1))
    assert trailer_is_valid(address, world.layout.payload_bytes)
    write_slot(world.arena, 1, b"\x01", TARGET)
    assert not trailer_is_valid(address, world.layout.payload_bytes)


def test_a_layer_range_touches_its_layers_only(make_world: MakeWorld) -> None:
    world = make_world(domain(kv_objects(num_layers=5)))
    data = random_block(world.layout, 3)
    write_slot(world.arena, 2, data, TARGET)
    stream = world.engine.stream()
    stream.restore(job([(2, 1)]), 1, 3)
    stream.synchronize()
    first, last = world.layout.layer_span(1, 3)
    expected = bytes(first) + data[first:last] + bytes(len(data) - last)
    assert read_block(world.cache, 1) == expected


def test_one_source_may_fill_two_blocks(make_world: MakeWorld) -> None:
    world = make_world(domain())
    data = random_block(world.layout, 4)
    write_slot(world.arena, 2, data, TARGET)
    stream = world.engine.stream()
    stream.restore(job([(2, 1), (2, 4)]), 0, world.layout.num_layers)
    stream.synchronize()
    assert read_block(world.cache, 1) == read_block(world.cache, 4) == data


def test_an_event_means_that_everything_before_it_is_copied(make_world: MakeWorld) -> None:
    world = make_world(domain(kv_objects(num_layers=7)))
    data = random_block(world.layout, 5)
    write_slot(world.arena, 1, data, TARGET)
    stream = world.engine.stream()
    ranges = layer_ranges(7, 3)
    events = []
    for start, stop in ranges:
        stream.restore(job([(1, 1)]), start, stop)
        events.append(stream.record())
    for (_, stop), event in zip(ranges, events, strict=True):
        world.engine.compute_waits(event)
        assert event.query()
        assert (
            read_block(world.cache, 1)[: world.layout.layer_span(0, stop)[1]] == data[: stop * world.layout.layer_bytes]
        )


def test_a_stream_that_waits_for_an_event_copies_after_it(make_world: MakeWorld) -> None:
    """Device block 1 is saved by one stream and overwritten by another: the order is all that saves its content."""
    world = make_world(domain())
    old, new = random_block(world.layout, 6), random_block(world.layout, 7)
    write_block(world.cache, 1, old)
    write_slot(world.arena, 4, new, TARGET)
    saver, loader = world.engine.stream(), world.engine.stream()
    saver.writeback(job([(3, 1)]))
    loader.wait(saver.record())
    loader.restore(job([(4, 1)]), 0, world.layout.num_layers)
    loader.synchronize()
    assert read_slot(world.arena, 3, TARGET) == old
    assert read_block(world.cache, 1) == new


def test_a_copy_waits_for_a_compute_event(make_world: MakeWorld) -> None:
    world = make_world(domain())
    write_block(world.cache, 2, random_block(world.layout, 8))
    stream = world.engine.stream()
    stream.wait(world.engine.record_compute())
    stream.writeback(job([(1, 2)]))
    stream.synchronize()
    assert read_slot(world.arena, 1, TARGET) == random_block(world.layout, 8)


def test_a_failure_is_told_by_later_events_and_by_synchronize_and_then_forgotten(make_world: MakeWorld) -> None:
    world = make_world(domain())
    stream = world.engine.stream()
    before = stream.record()
    stream.restore(job([(SLOTS + 3, 1)]), 0, 1)  # no such slot
    stream.restore(job([(1, 2)]), 0, world.layout.num_layers)
    after = stream.record()
    with pytest.raises(TransferFailed):
        after.synchronize()
    with pytest.raises(TransferFailed):
        world.engine.compute_waits(after)
    before.synchronize()
    with pytest.raises(TransferFailed):
        stream.synchronize()
    data = random_block(world.layout, 2)
    write_slot(world.arena, 1, data, TARGET)
    stream.restore(job([(1, 2)]), 0, world.layout.num_layers)
    stream.synchronize()
    assert read_block(world.cache, 2) == data


def test_a_failed_stream_skips_its_work_until_somebody_noticed(make_world: MakeWorld) -> None:
    world = make_world(domain())
    write_slot(world.arena, 1, random_block(world.layout, 2), TARGET)
    stream = world.engine.stream()
    stream.writeback(job([(SLOTS, 1)]))
    stream.restore(job([(1, 2)]), 0, world.layout.num_layers)
    with pytest.raises(TransferFailed):
        stream.synchronize()
    assert read_block(world.cache, 2) == bytes(world.layout.payload_bytes)


def test_a_failure_stays_with_its_own_stream(make_world: MakeWorld) -> None:
    world = make_world(domain())
    data = random_block(world.layout, 2)
    write_slot(world.arena, 1, data, TARGET)
    broken, sound = world.engine.stream(), world.engine.stream()
    broken.restore(job([(SLOTS, 1)]), 0, 1)
    sound.wait(broken.record())
    sound.restore(job([(1, 2)]), 0, world.layout.num_layers)
    sound.synchronize()
    assert read_block(world.cache, 2) == data


def test_counters_count_bytes_of_good_copies(make_world: MakeWorld) -> None:
    world = make_world(domain())
    stream = world.engine.stream()
    stream.writeback(job([(1, 1), (2, 2)]))
    stream.restore(job([(1, 3)]), 0, 2)
    stream.synchronize()
    stream.restore(job([(SLOTS, 3)]), 0, 2)
    with pytest.raises(TransferFailed):
        stream.synchronize()
    counters = world.engine.counters
    assert counters.writeback_bytes == 2 * world.layout.payload_bytes
    assert counters.restore_bytes == 2 * world.layout.layer_bytes


def test_close_finishes_what_was_submitted(make_world: MakeWorld) -> None:
    world = make_world(domain())
    data = random_block(world.layout, 2)
    write_slot(world.arena, 1, data, TARGET)
    world.engine.stream().restore(job([(1, 2)]), 0, world.layout.num_layers)
    world.engine.close()
    assert read_block(world.cache, 2) == data
    world.engine.close()


@st.composite
def random_layouts(draw: st.DrawFn) -> ObjectLayout:
    """Tensors of few sizes, so that equal neighbours are common."""
    layers = draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.UINT8]))
    if draw(st.booleans()):
        return kv_objects(layers, draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 5)), dtype)
    return indexed_objects(layers)


@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=40)
@given(objects=random_layouts(), data=st.data())
def test_any_layout_and_any_mapping_round_trips(kind: str, objects: ObjectLayout, data: st.DataObject) -> None:
    world = WORLDS[kind](domain(objects))
    try:
        blocks = data.draw(st.permutations(range(1, BLOCKS)))
        slots = data.draw(st.permutations(range(1, SLOTS)))[: len(blocks)]
        targets = data.draw(st.permutations(range(1, BLOCKS)))
        for block in blocks:
            write_block(world.cache, block, random_block(objects, block))
        out, back = world.engine.stream(), world.engine.stream()
        out.writeback(job(list(zip(slots, blocks, strict=True))))
        out.synchronize()
        for start, stop in layer_ranges(objects.num_layers, data.draw(st.integers(0, 4))):
            back.restore(job(list(zip(slots, targets, strict=True))), start, stop)
        back.synchronize()
        for block, target in zip(blocks, targets, strict=True):
            assert read_block(world.cache, target) == random_block(objects, block)
    finally:
        world.engine.close()


# what only one of them does


def test_cpu_copies_do_not_block_the_submitting_thread() -> None:
    world = cpu_world(domain())
    stream, gate = world.engine.stream(), Gate()
    stream.wait(gate)
    stream.restore(job([(1, 1)]), 0, 1)
    event = stream.record()
    assert not event.query(), "the copy cannot have started: its stream waits for an open gate"
    gate.open()
    event.synchronize()
    world.engine.close()


def test_waiting_for_a_late_copy_is_measured() -> None:
    world = cpu_world(domain())
    stream, gate = world.engine.stream(), Gate()
    stream.wait(gate)
    event = stream.record()
    threading.Thread(target=gate.open).start()
    assert world.engine.compute_waits(event) >= 0.0
    assert world.engine.compute_waits(event) == 0.0, "a past event costs nothing"
    world.engine.close()


def test_chaos_orders_streams_differently_by_seed_and_alike_by_equal_seed() -> None:
    def order(seed: int) -> Sequence[str]:
        world = chaos_world(domain(), seed)
        assert isinstance(world.engine, ChaosCopyEngine)
        for start in range(4):
            world.engine.stream().restore(job([(1, 1)]), start, start + 1)
        world.engine.close()
        return world.engine.log

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_chaos_fails_exactly_the_chosen_copy() -> None:
    layout = domain()
    cache = BytesDeviceCache(layout, BLOCKS)
    memory, arena = make_arena(layout)
    engine = ChaosCopyEngine(arena, [cache], 0, CopyFaults(restores=frozenset({1})))
    stream = engine.stream()
    stream.restore(job([(1, 1)]), 0, 1)
    good = stream.record()
    stream.restore(job([(1, 1)]), 1, 2)
    bad = stream.record()
    good.synchronize()
    with pytest.raises(TransferFailed, match="restore 1"):
        bad.synchronize()
    assert memory.freed is False


class Gate:
    """An event that happens when the test says so."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def synchronize(self) -> None:
        self._event.wait()

    def query(self) -> bool:
        return self._event.is_set()
