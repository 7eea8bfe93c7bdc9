"""Prefetches from the store: what is a miss, what is corrupt, and what verification changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvtier_worker.engine.ports import GetOutcome, StoreBuffer
from kvtier_worker.engine.transfers import TransferOptions
from kvtier_worker.testing.blocks import block_hash, domain
from kvtier_worker.testing.faulty_store import FaultProfile, FaultyStore
from kvtier_worker.testing.store import MemoryBackend, MemoryStore
from kvtier_worker.testing.transfer_worker import DRAFT, SLOTS, Worker, prefetch_items


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
