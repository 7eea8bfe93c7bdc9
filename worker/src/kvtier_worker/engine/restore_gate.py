"""How much of a match to restore, from rates measured while serving; off = everything. Feeds `core.costgate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier_worker.core.costgate import CostModel, RateEstimate, choose_restore
from kvtier_worker.core.prefix import PrefixMatch
from kvtier_worker.engine.messages import ForwardDone, WorkerStats
from kvtier_worker.engine.scheduler import StepPlan


@dataclass(slots=True)
class RestoreGate:
    """Trims what the tiers hold to what is worth copying.

    Args:
        enabled: ``--enable_restore_cost_gate``.
        object_bytes: of one block on one rank.
        block_size: tokens in a block.
        num_ranges: layer ranges of a restore: so finely does a copy hide behind compute.
    """

    enabled: bool
    object_bytes: int
    block_size: int
    num_ranges: int
    _prefill: RateEstimate = field(default_factory=RateEstimate)
    _restores: dict[int, RateEstimate] = field(default_factory=dict)
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def trim(self, prefix: PrefixMatch, num_tokens: int) -> PrefixMatch:
        """The part of ``prefix`` to use for a request of ``num_tokens`` tokens."""
        if not self.enabled or not prefix.num_restores or not self._restores:
            return prefix
        slowest = min(self._restores.values(), key=lambda estimate: estimate.per_second)
        worth = choose_restore(
            prefix.num_restores,
            bytes_per_block=self.object_bytes,
            block_size=self.block_size,
            tail_tokens=num_tokens - prefix.num_tokens,
            costs=CostModel(restore=slowest, prefill=self._prefill, num_layers=self.num_ranges),
        )
        return prefix.trim(worth)

    def on_step(self, plan: StepPlan, done: Sequence[ForwardDone]) -> None:
        """Learn the prefill rate from a step that computed prompts only and waited for no copy."""
        if plan.restores or any(entry.num_tokens == 1 for entry in plan.sequences):
            return
        self._prefill = self._prefill.observe(plan.num_tokens, max(message.compute_s for message in done))

    def on_stats(self, message: WorkerStats) -> None:
        """Learn a rank's restore bandwidth from what it copied since it last told."""
        num_bytes, seconds = self._seen.get(message.rank, (0, 0.0))
        self._seen[message.rank] = message.restore_bytes, message.restore_s
        estimate = self._restores.get(message.rank, RateEstimate())
        estimate = estimate.observe(message.restore_bytes - num_bytes, message.restore_s - seconds)
        if estimate.known:
            self._restores[message.rank] = estimate
