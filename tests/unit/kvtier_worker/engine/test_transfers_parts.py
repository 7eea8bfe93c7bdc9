"""The pieces that the transfer is made of, each on its own."""

from __future__ import annotations

import ctypes
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, CacheRole, HostSlot, JobId
from kvtier_worker.core.layout import TRAILER_BYTES
from kvtier_worker.core.plans import WritebackItem, WritebackPlan
from kvtier_worker.engine.arena import arena_bytes, bind_arena, plan_regions, planes
from kvtier_worker.engine.call_gate import CallGate
from kvtier_worker.engine.ports import Event
from kvtier_worker.engine.quarantine import Quarantine
from kvtier_worker.engine.store_objects import PutResult
from kvtier_worker.engine.synchronizer import LayerSynchronizer, SynchronizerTable
from kvtier_worker.engine.trailers import sign_trailer, trailer_is_valid, write_trailer
from kvtier_worker.engine.writeback_pipeline import CopyResult, StoreResult, WritebackPipeline
from kvtier_worker.errors import ProtocolError, TransferFailed
from kvtier_worker.testing.blocks import block_hash, domain, indexed_objects, kv_objects
from kvtier_worker.testing.copy import BytesDeviceCache, ChaosCopyEngine

# arena


def test_key_and_value_are_one_plane_and_odd_tensors_their_own() -> None:
    assert [(plane.offset, plane.count) for plane in planes(kv_objects())] == [(0, 2)]
    assert [(plane.offset, plane.count, plane.nbytes) for plane in planes(indexed_objects())] == [
        (0, 2, 64),
        (128, 1, 32),
        (160, 1, 16),
    ]


@given(num_slots=st.integers(2, 50), layers=st.integers(1, 5))
def test_no_two_objects_of_an_arena_overlap(num_slots: int, layers: int) -> None:
    domains = (
        domain({BlockType.KV: kv_objects(layers), BlockType.LINEAR: indexed_objects(layers)}),
        domain(indexed_objects(1), CacheRole.DRAFT, "spec_draft::x"),
    )
    regions = plan_regions(domains, num_slots)
    arena = bind_arena(1 << 30, regions)
    spans = sorted(
        (
            address := arena.slot_address(region.role, region.block_type, HostSlot(slot)),
            address + region.layout.object_bytes,
        )
        for region in regions
        for slot in range(1, num_slots)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] >= arena.address
    assert spans[-1][1] <= arena.address + arena.nbytes
    assert arena.nbytes == arena_bytes(regions)


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_padding_and_strange_slots_have_no_address(slot: int) -> None:
    arena = bind_arena(4096, plan_regions([domain()], 4))
    with pytest.raises(IndexError):
        arena.slot_address(CacheRole.TARGET, BlockType.KV, HostSlot(slot))


def test_a_trailer_knows_content_and_length() -> None:
    memory = ctypes.create_string_buffer(bytes(range(100)), 100 + TRAILER_BYTES)
    address = ctypes.addressof(memory)
    write_trailer(address, 100)
    assert trailer_is_valid(address, 100)
    for at in (0, 99, 100, 107, 108, 115):
        memory[at] = bytes([memory[at][0] ^ 1])
        assert not trailer_is_valid(address, 100), f"byte {at} changed unnoticed"
        memory[at] = bytes([memory[at][0] ^ 1])
    assert trailer_is_valid(address, 100)


def test_a_signed_trailer_knows_its_key() -> None:
    memory = ctypes.create_string_buffer(bytes(range(100)), 100 + TRAILER_BYTES)
    address = ctypes.addressof(memory)
    write_trailer(address, 100)
    assert not trailer_is_valid(address, 100, "mine")
    for _ in range(2):
        sign_trailer(address, 100, "mine")
        assert trailer_is_valid(address, 100, "mine")
        assert not trailer_is_valid(address, 100, "theirs")
        assert not trailer_is_valid(address, 100)


# synchroniser


def synchronizer(batch: int = 1, released: list[bool] | None = None) -> LayerSynchronizer:
    layout = domain()
    engine = ChaosCopyEngine(bind_arena(0, ()), [])
    stream = engine.stream()
    events: list[Event] = [stream.record(), stream.record()]
    assert layout.objects
    return LayerSynchronizer(
        BatchId(batch), engine, ((0, 2), (2, 4)), events, None, (released if released is not None else []).append
    )


def test_waiting_is_only_for_the_start_of_a_range() -> None:
    gate = synchronizer()
    gate.wait(1)
    gate.wait(3)
    assert not gate.events[0].query()
    gate.wait(0)
    assert gate.events[0].query()


def test_an_aborted_batch_fails_at_its_next_range() -> None:
    released: list[bool] = []
    gate = synchronizer(released=released)
    gate.wait(0)
    gate.abort("rank 1 refused")
    with pytest.raises(TransferFailed, match="rank 1 refused"):
        gate.wait(2)
    gate.abandon("")
    assert released == [True], "drained, because copies may still be running"


def test_a_finished_batch_gives_its_stream_back_once_and_undrained() -> None:
    released: list[bool] = []
    gate = synchronizer(released=released)
    gate.wait(0)
    gate.wait(2)
    gate.finish()
    gate.abandon("late")
    assert released == [False]


def test_ranges_without_events_are_a_bug() -> None:
    engine = ChaosCopyEngine(bind_arena(0, ()), [])
    with pytest.raises(ProtocolError):
        LayerSynchronizer(BatchId(1), engine, ((0, 2),), (), None, lambda _: None)


def test_a_batch_is_in_the_table_once() -> None:
    table = SynchronizerTable()
    first = synchronizer()
    table.register(first)
    with pytest.raises(ProtocolError):
        table.register(synchronizer())
    assert table.take(BatchId(1), expected=True) is first
    with pytest.raises(TransferFailed):
        table.take(BatchId(1), expected=True)


def test_taking_a_batch_leaves_later_ones_and_drops_earlier_ones() -> None:
    released: list[bool] = []
    table = SynchronizerTable()
    for batch in (1, 2, 3):
        table.register(synchronizer(batch, released))
    assert table.take(BatchId(2), expected=True) is not None
    assert released == [True]
    assert BatchId(3) in table
    table.abort_all("end")
    assert len(table) == 0


# quarantine


def test_quarantine_is_bounded_and_forgets_the_oldest() -> None:
    quarantine = Quarantine(10.0, 2, lambda: 0.0)
    for key in ("a", "b", "a", "c"):
        quarantine.add(key)
    assert len(quarantine) == 2
    assert "b" not in quarantine
    assert "a" in quarantine


# call gate


def test_a_closed_gate_lets_nobody_in_and_closes_once() -> None:
    gate = CallGate()
    with gate.enter() as accepted:
        assert accepted
    assert gate.close()
    assert not gate.close()
    with gate.enter() as accepted:
        assert not accepted


# pipeline


class Past:
    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


def plan(job: int) -> WritebackPlan:
    return WritebackPlan(JobId(job), (WritebackItem(BlockId(1), HostSlot(1), block_hash(job)),))


def test_the_next_job_is_copied_while_the_previous_one_is_being_put() -> None:
    second_copied = threading.Event()
    overlapped: list[bool] = []

    def put(job: WritebackPlan) -> StoreResult:
        if job.job_id == 1:
            overlapped.append(second_copied.wait(10))
        return StoreResult(PutResult(num_stored=1))

    pipeline = WritebackPipeline(lambda job, _: CopyResult(len(job.items)), put, max_queued_puts=4)
    pipeline.submit(plan(1), Past(), lambda _: None, lambda _: None)
    pipeline.submit(plan(2), Past(), lambda _: second_copied.set(), lambda _: None)
    pipeline.close()
    assert overlapped == [True]
    assert pipeline.num_pending == 0


def test_a_device_block_never_waits_for_a_slow_store() -> None:
    go_on = threading.Event()
    order: list[str] = []
    stored: list[PutResult] = []

    def put(job: WritebackPlan) -> StoreResult:
        assert go_on.wait(10)
        return StoreResult(PutResult(num_stored=1))

    pipeline = WritebackPipeline(lambda job, _: CopyResult(len(job.items)), put, max_queued_puts=1)
    copied = threading.Semaphore(0)
    for job in range(1, 6):

        def on_copied(_: CopyResult, job: int = job) -> None:
            order.append(f"copied {job}")
            copied.release()

        pipeline.submit(plan(job), Past(), on_copied, lambda result: stored.append(result.put))
    for _ in range(5):
        assert copied.acquire(timeout=10), "a copy waited for the store"
    go_on.set()
    pipeline.close()
    assert order == [f"copied {job}" for job in range(1, 6)]
    assert len(stored) == 5
    assert sum(result.num_failed for result in stored) == pipeline.num_skipped_puts >= 2


def test_a_short_copy_is_not_put() -> None:
    puts: list[WritebackPlan] = []

    def put(job: WritebackPlan) -> StoreResult:
        puts.append(job)
        return StoreResult(PutResult())

    stored: list[StoreResult] = []
    pipeline = WritebackPipeline(lambda _job, _after: CopyResult(0, error="broken"), put, max_queued_puts=1)
    pipeline.submit(plan(1), Past(), lambda _: None, stored.append)
    pipeline.close()
    assert puts == []
    assert stored[0].put.num_failed == 1


def test_the_fake_cache_is_zeroed() -> None:
    assert not any(BytesDeviceCache(domain(), 2).memory(BlockType.KV))
