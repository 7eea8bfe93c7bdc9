from __future__ import annotations

import itertools

import pytest
from kvtier_worker.core.ids import BatchId, Tier
from kvtier_worker.core.pool import BlockPool
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.messages import Writeback, WritebackCopied, WritebackStored
from kvtier_worker.engine.writeback import MAX_BLOCKS_PER_JOB, WritebackJobs
from kvtier_worker.testing.live import block_manager, live_request

PROMPT = list(range(9))


def copied(job: Writeback, rank: int, *, count: int | None = None, error: str = "") -> WritebackCopied:
    return WritebackCopied(rank, job.job_id, len(job.items) if count is None else count, 0, 0.0, error)


def stored(job: Writeback, rank: int) -> WritebackStored:
    return WritebackStored(rank, job.job_id, 0, 0, 0, 0, 0.0)


def one_job(num_ranks: int = 2) -> tuple[TieredBlockManager, BlockPool, WritebackJobs, Writeback]:
    blocks = block_manager()
    assert blocks.host is not None
    jobs = WritebackJobs(blocks.device, blocks.host, num_ranks)
    live = live_request(PROMPT)
    match = blocks.match(live, BatchId(1))
    blocks.allocate(live, match, match.prefix, BatchId(1))
    live.num_computed = len(PROMPT)
    jobs.add(blocks.settle(live))
    jobs.add(blocks.retire(live))
    (message,) = jobs.flush(itertools.count(1))
    return blocks, blocks.host.pool, jobs, message


def test_the_host_publishes_only_when_every_rank_copied_everything() -> None:
    _, host, jobs, job = one_job()
    jobs.on_copied(copied(job, 0))
    assert host.counts().published == 0
    jobs.on_copied(copied(job, 1))
    assert host.counts().published == 2


@pytest.mark.parametrize("bad", [{"count": 1}, {"error": "device lost"}])
def test_one_bad_rank_keeps_every_block_of_the_job_from_the_host(bad: dict[str, object]) -> None:
    _, host, jobs, job = one_job()
    jobs.on_copied(copied(job, 0))
    jobs.on_copied(copied(job, 1, **bad))  # type: ignore[arg-type]
    assert host.counts().published == 0
    assert jobs.num_failed_blocks == 2


def test_device_blocks_go_when_copied_and_host_slots_when_stored() -> None:
    blocks, host, jobs, job = one_job()
    jobs.on_copied(copied(job, 0))
    assert blocks.device.counts().leased == 2
    jobs.on_copied(copied(job, 1))
    assert blocks.device.counts().leased == 0
    jobs.on_stored(stored(job, 0))
    assert host.counts().leased == 2
    jobs.on_stored(stored(job, 1))
    assert (host.counts().leased, host.counts().cached) == (0, 2)
    assert jobs.idle


def test_a_fast_rank_may_end_its_put_before_a_slow_one_has_copied() -> None:
    _, host, jobs, job = one_job()
    jobs.on_copied(copied(job, 0))
    jobs.on_stored(stored(job, 0))
    jobs.on_copied(copied(job, 1))
    assert list(jobs.jobs) == [job.job_id]
    jobs.on_stored(stored(job, 1))
    assert jobs.idle
    assert host.counts().cached == 2


def test_answers_that_come_twice_or_for_no_job_are_ignored() -> None:
    blocks, _, jobs, job = one_job()
    for _ in range(3):
        jobs.on_copied(copied(job, 0))
    assert blocks.device.counts().leased == 2
    jobs.on_copied(WritebackCopied(0, 999, 2, 0, 0.0))
    jobs.on_stored(WritebackStored(0, 999, 0, 0, 0, 0, 0.0))


def test_long_prompts_travel_in_several_jobs() -> None:
    blocks = block_manager(num_device=64, num_host=64)
    assert blocks.host is not None
    jobs = WritebackJobs(blocks.device, blocks.host, 1)
    live = live_request(range(4 * MAX_BLOCKS_PER_JOB + 4))
    match = blocks.match(live, BatchId(1))
    blocks.allocate(live, match, match.prefix, BatchId(1))
    live.num_computed = len(live.tokens)
    jobs.add(blocks.settle(live))
    assert [len(job.items) for job in jobs.flush(itertools.count(1))] == [MAX_BLOCKS_PER_JOB, 1]
    assert blocks.host.pool.tier is Tier.HOST
