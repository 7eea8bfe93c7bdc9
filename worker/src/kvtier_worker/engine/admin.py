"""Admin calls that need more than one turn of the loop: they wait for jobs or for answers of every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier_worker.core.ids import BlockHash, JobId, Tier
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.frontend import PoolReport, ProbeReport
from kvtier_worker.engine.messages import StatsRequest, StoreProbe, StoreProbed, WorkerStats
from kvtier_worker.engine.writeback import WritebackJobs


@dataclass(slots=True)
class _Drop:
    tiers: frozenset[Tier]
    after: set[JobId]
    future: Future[Mapping[Tier, int]]


@dataclass(slots=True)
class _Probe:
    report: ProbeReport
    future: Future[ProbeReport]
    answers: dict[int, StoreProbed] = field(default_factory=dict)


@dataclass(slots=True)
class _Integrity:
    future: Future[tuple[PoolReport, ...]]
    answers: dict[int, WorkerStats] = field(default_factory=dict)


@dataclass(slots=True)
class AdminCalls:
    """Open admin calls. Called by the engine thread only.

    Args:
        blocks: the tiers.
        writebacks: jobs that a drop waits for; None without a host tier.
        block_size: tokens in a block.
        num_ranks: answers to wait for.
        store: whether there is a store to probe.
        send: takes a message for every rank.
        job_ids: ids that no other job has.
        check: runs the pools' checks.
        idle: whether no request is live and no job in flight.
        cancel_all: cancels every live request.
        drain_timeout_s: how long running requests get.
    """

    blocks: TieredBlockManager
    writebacks: WritebackJobs | None
    block_size: int
    num_ranks: int
    store: bool
    send: Callable[[StatsRequest | StoreProbe], None]
    job_ids: Iterator[int]
    check: Callable[[], tuple[PoolReport, ...]]
    idle: Callable[[], bool]
    cancel_all: Callable[[], None]
    drain_timeout_s: float
    _drops: list[_Drop] = field(default_factory=list)
    _probes: dict[int, _Probe] = field(default_factory=dict)
    _checks: dict[int, _Integrity] = field(default_factory=dict)
    _drains: list[Future[None]] = field(default_factory=list)
    _drain_deadline: float | None = None

    def drop(self, tiers: frozenset[Tier], future: Future[Mapping[Tier, int]]) -> None:
        """Drop once the write-backs of now are over: their blocks would come back as cached."""
        after = set() if self.writebacks is None else set(self.writebacks.jobs)
        self._drops.append(_Drop(tiers, after, future))

    def probe(self, prompt_tokens: int, hashes: Sequence[BlockHash], future: Future[ProbeReport]) -> None:
        """Ask the pools now and the store's clients through the workers."""
        host = self.blocks.host
        report = ProbeReport(
            prompt_tokens=prompt_tokens,
            full_blocks=len(hashes),
            block_size=self.block_size,
            device_blocks=sum(self.blocks.device.lookup(block_hash) is not None for block_hash in hashes),
            host_blocks=0 if host is None else sum(host.pool.lookup(block_hash) is not None for block_hash in hashes),
            store_blocks=0,
            store_available=False,
        )
        if not self.store or not hashes:
            future.set_result(report)
            return
        job_id = next(self.job_ids)
        self._probes[job_id] = _Probe(report, future)
        self.send(StoreProbe(job_id, [bytes(block_hash) for block_hash in hashes]))

    def integrity(self, future: Future[tuple[PoolReport, ...]]) -> None:
        """Check the pools when every worker has checked itself."""
        job_id = next(self.job_ids)
        self._checks[job_id] = _Integrity(future)
        self.send(StatsRequest(job_id))

    def drain(self, now: float, future: Future[None]) -> None:
        """Resolve when idle."""
        self._drains.append(future)
        if self._drain_deadline is None:
            self._drain_deadline = now + self.drain_timeout_s

    def on_probed(self, message: StoreProbed) -> None:
        """A rank told which blocks its store holds."""
        probe = self._probes.get(message.job_id)
        if probe is None:
            return
        probe.answers[message.rank] = message
        if len(probe.answers) < self.num_ranks:
            return
        del self._probes[message.job_id]
        answers = [answer for answer in probe.answers.values() if len(answer.exists) == probe.report.full_blocks]
        whole = len(answers) == self.num_ranks
        on_every_rank = zip(*(answer.exists for answer in answers), strict=True) if whole else ()
        probe.future.set_result(
            replace(
                probe.report,
                store_blocks=sum(all(column) for column in on_every_rank),
                store_available=whole and all(answer.available for answer in answers),
            )
        )

    def on_stats(self, message: WorkerStats) -> None:
        """A rank told what its own check found."""
        check = self._checks.get(message.job_id)
        if check is None:
            return
        check.answers[message.rank] = message
        if len(check.answers) < self.num_ranks:
            return
        del self._checks[message.job_id]
        workers = tuple(
            PoolReport(f"worker {rank}", not answer.faults, 0, 0, 0, 0, tuple(answer.faults))
            for rank, answer in sorted(check.answers.items())
        )
        check.future.set_result(self.check() + workers)

    def turn(self, now: float) -> None:
        """Complete what can be."""
        for drop in list(self._drops):
            if self.writebacks is None or not drop.after & set(self.writebacks.jobs):
                self._drops.remove(drop)
                drop.future.set_result(self._dropped(drop.tiers))
        if self._drains and self.idle():
            for future in self._drains:
                future.set_result(None)
            self._drains.clear()
            self._drain_deadline = None
        elif self._drain_deadline is not None and now >= self._drain_deadline and self._drains:
            self._drain_deadline = None
            self.cancel_all()

    def next_deadline(self) -> float | None:
        """When `turn` is due by time."""
        return self._drain_deadline

    def fail(self, error: Exception) -> None:
        """The engine is gone: every open call fails."""
        futures: list[Future[Any]] = [drop.future for drop in self._drops]
        futures += [probe.future for probe in self._probes.values()]
        futures += [check.future for check in self._checks.values()]
        futures += self._drains
        for future in futures:
            future.set_exception(error)

    def _dropped(self, tiers: frozenset[Tier]) -> Mapping[Tier, int]:
        dropped: dict[Tier, int] = {}
        if Tier.DEVICE in tiers:
            dropped[Tier.DEVICE] = self.blocks.device.drop_cached()
        if Tier.HOST in tiers:
            dropped[Tier.HOST] = 0 if self.blocks.host is None else self.blocks.host.pool.drop_cached()
        return dropped
