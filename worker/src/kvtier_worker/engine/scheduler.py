"""What the next step computes: continuous batching with a token budget. Plans only; the loop sends and commits.

Decodes come first, then prompts that are half done, then new ones, each by rank (priority, arrival). A decode that
cannot grow takes the blocks of the lowest-ranked running request, which waits again and resumes through the cache.
New requests enter in rank order: one that does not fit is not overtaken, so it cannot starve.

Work per step is proportional to the running sequences, not to their lengths.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BatchId, BlockHash, RequestId, Tier
from kvtier_worker.core.lifecycle import RequestEvent, RequestState
from kvtier_worker.core.plans import RestoreItem
from kvtier_worker.core.prefix import PrefixMatch
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.host_tier import WritebackEntry
from kvtier_worker.engine.metrics import EngineMetrics
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.engine.tier_match import TierMatch
from kvtier_worker.engine.waiting import WaitingQueue, rank_key


class ScheduledSequence(NamedTuple):
    """Tokens ``[start, start + num_tokens)`` of one request in one step."""

    live: LiveRequest
    start: int
    num_tokens: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """One step. ``restores`` must be registered on every rank before its Forward."""

    batch_id: BatchId
    sequences: list[ScheduledSequence] = field(default_factory=list)
    restores: list[RestoreItem] = field(default_factory=list)
    num_tokens: int = 0
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Budgets of a step.

    Attributes:
        tokens: all sequences together.
        sequences: at most.
        chunk_tokens: of one prompt.
        chunked: whether a prompt may span steps.
        mixed: whether prompts and decodes share a step.
        restores: blocks copied host -> device; None = no limit.
        in_batch: whether a prompt waits for an equal prefix that is being computed.
    """

    tokens: int
    sequences: int
    chunk_tokens: int
    chunked: bool
    mixed: bool
    restores: int | None
    in_batch: bool

    @classmethod
    def of(cls, settings: WorkerSettings) -> StepLimits:
        """The limits that ``settings`` ask for."""
        chunk = settings.max_tokens_per_chunk_for_prefill
        return cls(
            tokens=settings.max_tokens_per_batch,
            sequences=settings.max_seqs_per_batch,
            chunk_tokens=chunk if chunk > 0 else settings.max_tokens_per_batch,
            chunked=settings.enable_chunked_prefill,
            mixed=settings.enable_mix_batch and settings.enable_chunked_prefill,
            restores=settings.max_h2d_blocks_per_step if settings.enable_control_h2d_block_num else None,
            in_batch=settings.enable_in_batch_prefix_cache and settings.enable_prefix_cache,
        )


@dataclass(slots=True)
class Scheduler:
    """See the module.

    Args:
        limits: budgets of a step.
        blocks: the tiers.
        metrics: counts preemptions and probes.
        find: a live request by id.
        write_back: takes what a preempted request leaves behind.
        gate: trims a match, for a request of so many tokens, to what is worth restoring.
        clock: for the latencies it reports; nothing is decided by it.
    """

    limits: StepLimits
    blocks: TieredBlockManager
    metrics: EngineMetrics
    find: Callable[[RequestId], LiveRequest | None]
    write_back: Callable[[list[WritebackEntry]], None]
    gate: Callable[[PrefixMatch, int], PrefixMatch]
    clock: Callable[[], float]
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[LiveRequest] = field(default_factory=list)
    _computing: dict[BlockHash, LiveRequest] = field(default_factory=dict)
    _prefilled_last: bool = False

    def schedule(self, batch_id: BatchId) -> StepPlan | None:
        """Plan the step ``batch_id``; None = nothing can be computed now. No step may be in flight."""
        plan = StepPlan(batch_id)
        if self.limits.mixed:
            self._decode(plan)
            self._prefill(plan)
        else:
            self._alternate(plan)
        return plan if plan.sequences else None

    def _alternate(self, plan: StepPlan) -> None:
        """Prompts before decodes, but never twice in a row while there are decodes."""
        if self._prefilled_last:
            self._decode(plan)
        self._prefilled_last = False
        if not plan.sequences:
            self._prefill(plan)
            self._prefilled_last = bool(plan.sequences)
        if not plan.sequences:
            self._decode(plan)

    def leave(self, live: LiveRequest) -> None:
        """``live`` is not running or waiting any more, or waits again; whoever is parked behind it may go on."""
        if live in self.running:
            self.running.remove(live)
        else:
            self.waiting.remove(live)
        if self.limits.in_batch:
            self._computing = {key: owner for key, owner in self._computing.items() if owner is not live}
        self.waiting.unpark(live.request_id)

    def progressed(self, live: LiveRequest) -> None:
        """``live`` completed blocks or its prompt: whoever is parked behind it may go on."""
        self.waiting.unpark(live.request_id)

    # decode

    def _decode(self, plan: StepPlan) -> None:
        """One token of every sequence that has nothing else to compute; the loop that every step pays for."""
        block_size, sequences = self.blocks.block_size, plan.sequences
        most = min(self.limits.sequences, self.limits.tokens - plan.num_tokens)
        for live in list(self.running):
            if len(sequences) >= most:
                break
            length, start = len(live.tokens), live.num_computed
            if length - start != 1 or live.state is not RequestState.RUNNING:
                continue
            if length > len(live.held.table) * block_size and not self._grow(live, plan):
                continue
            if length % block_size == 0:
                self.blocks.reserve_writeback(live, length)
            sequences.append(ScheduledSequence(live, start, 1, sample=True))
        plan.num_tokens += len(sequences)

    def _grow(self, live: LiveRequest, plan: StepPlan) -> bool:
        while not self.blocks.grow(live):
            victim = self.running[-1]
            if victim is live and len(self.running) == 1:
                return False  # write-backs hold the rest and will give it back
            self._preempt(victim)
            plan.preempted = True
            if victim is live:
                return False
        return True

    def _preempt(self, live: LiveRequest) -> None:
        self.write_back(self.blocks.retire(live))
        live.apply(RequestEvent.PREEMPTED)
        self.leave(live)
        self.waiting.add(live)
        self.metrics.preempted.inc()

    # prefill

    def _prefill(self, plan: StepPlan) -> None:
        for live in self.running:
            if len(plan.sequences) >= self.limits.sequences or plan.num_tokens >= self.limits.tokens:
                return
            if live.remaining > 1:
                self._add(plan, live, self._chunk(plan, live.remaining))
        if not plan.preempted:
            self._admit(plan)

    def _admit(self, plan: StepPlan) -> None:
        while plan.num_tokens < self.limits.tokens and len(self.running) < self.limits.sequences:
            live = self.waiting.first()
            if live is None:
                return
            owner = self._leader_of(live)
            if owner is not None:
                self.waiting.park(self.waiting.pop_first(), owner.request_id)
                continue
            started = self.clock()
            match = self.blocks.match(live, plan.batch_id)
            self.metrics.match_s.inc(self.clock() - started)
            owner = self._computing_for(live, match)
            if owner is not None:
                self.waiting.park(self.waiting.pop_first(), owner.request_id)
                continue
            if not self._start(plan, live, match):
                return

    def _start(self, plan: StepPlan, live: LiveRequest, match: TierMatch) -> bool:
        prefix = self._affordable(plan, self.gate(match.prefix, len(live.tokens)))
        if prefix is None:
            return False
        remaining = len(live.tokens) - prefix.num_tokens
        fits = remaining <= self.limits.tokens - plan.num_tokens
        if not self.limits.chunked and not fits and (plan.sequences or not live.num_outputs):
            return False
        started = self.clock()
        restores = self.blocks.allocate(live, match, prefix, plan.batch_id, headroom=len(self.running))
        self.metrics.allocate_s.inc(self.clock() - started)
        if restores is None:
            return False
        plan.restores += restores
        live.apply(RequestEvent.SCHEDULED)
        insort(self.running, self.waiting.pop_first(), key=rank_key)
        self._count(match, prefix)
        if self.limits.in_batch:
            for block_hash in match.hashes[len(prefix.tiers) :]:
                self._computing.setdefault(block_hash, live)
        self._add(plan, live, self._chunk(plan, remaining))
        return True

    def _affordable(self, plan: StepPlan, prefix: PrefixMatch) -> PrefixMatch | None:
        """The part of a match to restore in this step; None = wait for a step with more of its budget left."""
        if self.limits.restores is None or not prefix.num_restores:
            return prefix
        left = self.limits.restores - len(plan.restores)
        if plan.restores and prefix.num_restores > left:
            return None
        return prefix.trim(left)

    def _chunk(self, plan: StepPlan, remaining: int) -> int:
        if not self.limits.chunked and remaining <= self.limits.tokens - plan.num_tokens:
            return remaining
        return min(remaining, self.limits.chunk_tokens, self.limits.tokens - plan.num_tokens)

    def _leader_of(self, live: LiveRequest) -> LiveRequest | None:
        """Choice 0 of the same prompt, while its prompt is not computed; None = do not wait."""
        leader_id = live.request.leader
        if leader_id is None or not self.blocks.prefix_cache:
            return None
        leader = self.find(leader_id)
        return leader if leader is not None and leader is not live and not leader.num_outputs else None

    def _computing_for(self, live: LiveRequest, match: TierMatch) -> LiveRequest | None:
        count = len(match.prefix.tiers)
        if not self.limits.in_batch or count >= len(match.hashes):
            return None
        owner = self._computing.get(match.hashes[count])
        return owner if owner is not live else None

    # both

    def _add(self, plan: StepPlan, live: LiveRequest, count: int) -> None:
        start = live.num_computed
        end = start + count
        self.blocks.reserve_writeback(live, end)
        plan.sequences.append(ScheduledSequence(live, start, count, end == len(live.tokens)))
        plan.num_tokens += count

    def _count(self, match: TierMatch, prefix: PrefixMatch) -> None:
        on_device = len(prefix.tiers) - prefix.num_restores
        self.metrics.probed(Tier.DEVICE, len(match.hashes), on_device)
        if match.host:
            self.metrics.probed(Tier.HOST, len(match.hashes) - on_device, prefix.num_restores)
