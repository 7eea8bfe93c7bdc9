"""Write-backs to host and store: which are refused or fail, which objects they put, which they replace."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from kvtier_worker.core.ids import BlockType, Rank
from kvtier_worker.engine.copy_streams import CopyStreamPool
from kvtier_worker.engine.ports import CopyJob, PutOutcome, StoreBuffer
from kvtier_worker.engine.transfers import TransferOptions
from kvtier_worker.errors import TransferFailed
from kvtier_worker.testing.blocks import domain
from kvtier_worker.testing.copy import CopyFaults
from kvtier_worker.testing.faulty_store import FaultProfile, FaultyStore
from kvtier_worker.testing.store import MemoryBackend, MemoryStore
from kvtier_worker.testing.transfer_worker import DRAFT, SLOTS, Outcome, Worker, raises, writeback_plan


@pytest.mark.parametrize(
    ("items", "complaint"),
    [((), "empty"), (((1, 0, 1),), "host slot 0"), (((1, 2, 1), (2, 2, 2)), "names a host slot twice")],
)
def test_an_impossible_writeback_is_refused(items: tuple[tuple[int, int, int], ...], complaint: str) -> None:
    outcome = Outcome()
    with pytest.raises(TransferFailed, match=complaint):
        Worker().transfer.writeback(writeback_plan(*items), outcome.on_copied, outcome.on_stored)
    assert outcome.order == []


@pytest.mark.parametrize("seed", range(8))
def test_a_writeback_takes_what_late_compute_wrote(seed: int) -> None:
    worker = Worker(seed=seed)
    worker.engine.submit_compute(lambda: worker.fill(3, seed=1))
    worker.write_back((3, 5, 1))
    worker.restore(1, (5, 4))
    worker.run(1)
    assert worker.holds(4, seed=1)


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


def test_a_writeback_that_ends_during_the_check_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is leased when the streams are counted, and it is over when the jobs are."""
    worker, outcome = Worker(), Outcome()
    inside, go_on = threading.Event(), threading.Event()
    copy = worker.engine.writeback

    def slow(job: CopyJob) -> None:
        inside.set()
        assert go_on.wait(10)
        copy(job)

    def count_and_let_it_end(pool: CopyStreamPool) -> int:
        count = pool._made - len(pool._free)
        go_on.set()
        outcome.wait()
        return count

    monkeypatch.setattr(worker.engine, "writeback", slow)
    monkeypatch.setattr(CopyStreamPool, "num_leased", property(count_and_let_it_end))
    worker.transfer.writeback(writeback_plan((1, 1, 1)), outcome.on_copied, outcome.on_stored)
    assert inside.wait(10)
    assert worker.transfer.check_integrity() == []
    go_on.set()
    outcome.wait()
    assert worker.transfer.check_integrity() == []
