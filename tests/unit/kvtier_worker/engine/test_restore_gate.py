from __future__ import annotations

from kvtier_worker.core.ids import BatchId, Tier
from kvtier_worker.core.prefix import PrefixMatch
from kvtier_worker.engine.messages import ForwardDone, WorkerStats
from kvtier_worker.engine.restore_gate import RestoreGate
from kvtier_worker.engine.scheduler import ScheduledSequence, StepPlan
from kvtier_worker.testing.live import live_request

PREFIX = PrefixMatch((Tier.DEVICE, Tier.HOST, Tier.HOST), 4)


def gate(*, restore_bytes: int = 0, prefill_s: float = 0.0, enabled: bool = True) -> RestoreGate:
    made = RestoreGate(enabled, object_bytes=1000, block_size=4, num_ranges=1)
    if restore_bytes:
        made.on_stats(WorkerStats(0, 1, 0, restore_bytes, 1.0, 0, 0.0, "closed", {}, []))
    if prefill_s:
        live = live_request(range(100))
        plan = StepPlan(BatchId(1), [ScheduledSequence(live, 0, 100, sample=True)], [], 100)
        made.on_step(plan, [ForwardDone(0, 1, [], prefill_s, 0.0)])
    return made


def test_everything_is_restored_while_a_rate_is_unknown_or_the_gate_is_off() -> None:
    for unsure in (gate(), gate(restore_bytes=10), gate(restore_bytes=1, prefill_s=0.001, enabled=False)):
        assert unsure.trim(PREFIX, 14) is PREFIX


def test_a_slow_copy_loses_against_a_fast_model() -> None:
    assert gate(restore_bytes=10, prefill_s=0.001).trim(PREFIX, 14).num_restores == 0


def test_a_fast_copy_wins_against_a_slow_model() -> None:
    assert gate(restore_bytes=10**9, prefill_s=100.0).trim(PREFIX, 14) == PREFIX


def test_steps_that_decode_or_restore_teach_no_prefill_rate() -> None:
    made = gate(restore_bytes=10)
    live = live_request(range(5))
    decode = StepPlan(BatchId(1), [ScheduledSequence(live, 4, 1, sample=True)], [], 1)
    made.on_step(decode, [ForwardDone(0, 1, [], 0.001, 0.0)])
    assert made.trim(PREFIX, 14) is PREFIX
