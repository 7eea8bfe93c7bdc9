"""Restores from the host: which are refused, which stop a forward, in which order they happen."""

from __future__ import annotations

import pytest
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, CacheRole, HostSlot
from kvtier_worker.core.plans import RestoreItem, RestorePlan
from kvtier_worker.engine.ports import LayerGate
from kvtier_worker.engine.transfers import TransferOptions
from kvtier_worker.errors import ProtocolError, TransferFailed
from kvtier_worker.testing.blocks import random_block, write_slot
from kvtier_worker.testing.copy import CopyFaults
from kvtier_worker.testing.transfer_worker import BLOCKS, SLOTS, Worker, raises


def wait_for_every_layer(gate: LayerGate) -> None:
    for layer in range(4):
        gate.wait(layer)


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


@pytest.mark.parametrize("seed", range(5))
def test_a_forward_that_samples_nothing_ends_after_its_restores_left_the_host(seed: int) -> None:
    """Compute waits on the device, and no token is read: only `finish` keeps the slot from its next owner."""
    worker = Worker(seed=seed, device_waits=True)
    worker.fill(3, seed=1)
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    worker.run(1)
    write_slot(worker.arena, 5, random_block(worker.cache.layout.objects[BlockType.KV], 2), CacheRole.TARGET)
    worker.transfer.shutdown()
    assert worker.holds(4, seed=1)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_copy_that_fails_while_the_device_waits_fails_the_forward(failing: int) -> None:
    worker = Worker(faults=CopyFaults(restores=frozenset({failing})), device_waits=True)
    worker.restore(1, (5, 4))
    with pytest.raises(TransferFailed, match="fails as planned"):
        worker.run(1)
    assert worker.transfer.check_integrity() == []


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


def test_more_restores_than_streams_are_refused_and_later_accepted() -> None:
    worker = Worker(options=TransferOptions("model", SLOTS, num_streams=2))
    worker.restore(1, (1, 1))
    worker.restore(2, (1, 2))
    with pytest.raises(TransferFailed, match="all 2 copy streams"):
        worker.restore(3, (1, 3))
    worker.run(1)
    worker.restore(3, (1, 3))


def test_a_restore_that_cannot_be_queued_gives_its_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    with monkeypatch.context() as broken:
        broken.setattr(worker.engine, "record_compute", raises(RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            worker.restore(1, (1, 1))
    assert worker.transfer.check_integrity() == []
    worker.restore(2, (1, 1))
    worker.run(2)
