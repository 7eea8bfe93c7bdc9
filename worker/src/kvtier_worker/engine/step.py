"""One step in flight: what is sent for a plan, which answers are due, and whether its results may be used (R2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtier_worker.engine.messages import (
    Forward,
    ForwardDone,
    RegisterRestore,
    RestoreRegistered,
    SequenceStep,
    TokenOutput,
)
from kvtier_worker.engine.scheduler import StepPlan

SILENT_S: Final = 300.0
"""How long a rank may leave a step unanswered whatever is in it: copies, a cold device, a busy machine."""

SILENT_S_PER_TOKEN: Final = 0.5
"""And so much longer per token of the step, which is slower than any machine that is of use."""


def forward_message(plan: StepPlan) -> Forward:
    """The Forward of ``plan``. It refers to live block tables: send encodes or copies it at once."""
    sequences = [
        SequenceStep(
            live.request.request_id,
            live.tokens[start : start + count],
            start,
            live.held.table,
            sample,
            (live.sampling_now() if live.needs_history else live.sampling) if sample else None,
        )
        for live, start, count, sample in plan.sequences
    ]
    return Forward(plan.batch_id, bool(plan.restores), sequences)


def restore_message(plan: StepPlan) -> RegisterRestore | None:
    """What must be sent before the Forward of ``plan``; None = nothing is restored."""
    return RegisterRestore(plan.batch_id, plan.restores) if plan.restores else None


@dataclass(slots=True)
class StepInFlight:
    """Collects the answers to one step.

    The engine does not wait for the ACK of a restore before it sends the Forward: both travel one ordered lane. But a
    step whose ACK is missing, wrong or short counts as failed, whatever its Forward says.
    """

    plan: StepPlan
    num_ranks: int
    started: float
    done: dict[int, ForwardDone] = field(default_factory=dict)
    _acknowledged: set[int] = field(default_factory=set)
    _errors: list[str] = field(default_factory=list)
    _outputs: dict[str, TokenOutput] = field(default_factory=dict)

    def on_registered(self, message: RestoreRegistered) -> None:
        """A rank acknowledged the restores of a batch; of another batch: ignored."""
        if message.batch_id != self.plan.batch_id:
            return
        expected = len(self.plan.restores)
        if message.error or message.count != expected:
            what = message.error or f"{message.count} of {expected} blocks registered"
            self._errors.append(f"rank {message.rank}: restore: {what}")
        self._acknowledged.add(message.rank)

    def on_done(self, message: ForwardDone) -> None:
        """A rank ended a batch; another batch: ignored."""
        if message.batch_id != self.plan.batch_id or message.rank in self.done:
            return
        self.done[message.rank] = message
        if message.error:
            self._errors.append(f"rank {message.rank}: {message.error}")
        if self.plan.restores and message.rank not in self._acknowledged:
            self._errors.append(f"rank {message.rank}: ran without acknowledging the restore")

    @property
    def complete(self) -> bool:
        """Whether every rank ended it: no copy and no computation of it touches a block any more."""
        return len(self.done) == self.num_ranks

    def overdue(self, now: float) -> str:
        """Which ranks should have ended it by now; empty = none."""
        num_tokens, waited_s = self.plan.num_tokens, now - self.started
        if self.complete or waited_s < SILENT_S + SILENT_S_PER_TOKEN * num_tokens:
            return ""
        silent = [rank for rank in range(self.num_ranks) if rank not in self.done]
        return f"no answer from ranks {silent} to a step of {num_tokens} tokens in {waited_s:.0f} s"

    def outputs(self) -> Mapping[str, TokenOutput]:
        """Sampled tokens by request, once rank 0 ended it."""
        if not self._outputs:
            self._outputs = {output.request_id: output for output in self.done[0].outputs}
        return self._outputs

    def error(self) -> str:
        """Why nothing of it may be used; empty = it may."""
        if self._errors:
            return "; ".join(self._errors)
        outputs = self.outputs()
        missing = [s.live.request_id for s in self.plan.sequences if s.sample and s.live.request_id not in outputs]
        return f"rank 0: no token for {', '.join(missing)}" if missing else ""
