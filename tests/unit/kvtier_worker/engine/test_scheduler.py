from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BatchId, RequestId
from kvtier_worker.core.lifecycle import RequestState
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.host_tier import WritebackEntry
from kvtier_worker.engine.metrics import EngineMetrics
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.engine.scheduler import Scheduler, StepLimits, StepPlan
from kvtier_worker.testing.live import block_manager, live_request

LIMITS = StepLimits.of(WorkerSettings(model="m", block_size=4))


@dataclass
class Bench:
    """A scheduler whose steps succeed at once, with token 7 for everybody."""

    limits: StepLimits = LIMITS
    blocks: TieredBlockManager = field(default_factory=block_manager)
    live: dict[RequestId, LiveRequest] = field(default_factory=dict)
    written: list[WritebackEntry] = field(default_factory=list)
    batch: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.limits,
            self.blocks,
            EngineMetrics(),
            self.live.get,
            self.written.extend,
            lambda prefix, _: prefix,
            lambda: 0.0,
        )

    def add(self, prompt: Sequence[int], *, leader: LiveRequest | None = None) -> LiveRequest:
        live = live_request(prompt, leader=None if leader is None else leader.request_id, max_tokens=1000)
        self.live[live.request_id] = live
        self.scheduler.waiting.add(live)
        return live

    def plan(self) -> StepPlan:
        self.batch += 1
        return self.scheduler.schedule(BatchId(self.batch)) or StepPlan(BatchId(self.batch))

    def step(self) -> StepPlan:
        plan = self.plan()
        for live, start, count, sample in plan.sequences:
            live.num_computed = start + count
            self.written += self.blocks.settle(live)
            if sample:
                live.tokens.append(7)
            self.scheduler.progressed(live)
        return plan

    def counts(self, plan: StepPlan) -> dict[LiveRequest, int]:
        return {entry.live: entry.num_tokens for entry in plan.sequences}

    def host_has(self, prompt: Sequence[int]) -> None:
        """Put a prompt's blocks on the host and nowhere else."""
        live = self.add(prompt)
        while live.remaining > 1 or live.num_outputs == 0:
            self.step()
        entries = [*self.written, *self.blocks.retire(live)]
        self.written.clear()
        self.scheduler.leave(live)
        assert self.blocks.host is not None
        self.blocks.host.end_copy(entries, ok=True)
        self.blocks.device.release([entry.item.device_block for entry in entries])
        self.blocks.host.pool.release([entry.item.host_slot for entry in entries])
        self.blocks.device.drop_cached()


def test_nothing_to_do_is_no_plan() -> None:
    assert Bench().scheduler.schedule(BatchId(1)) is None


def test_a_long_prompt_is_cut_into_chunks_and_samples_only_at_its_end() -> None:
    bench = Bench(replace(LIMITS, chunk_tokens=6))
    bench.add(range(14))
    steps = [bench.step().sequences[0] for _ in range(4)]
    assert [(s.start, s.num_tokens, s.sample) for s in steps] == [
        (0, 6, False),
        (6, 6, False),
        (12, 2, True),
        (14, 1, True),
    ]


def test_decodes_come_before_prompts_and_both_fit_the_token_budget() -> None:
    bench = Bench(replace(LIMITS, tokens=8))
    first = bench.add(range(5))
    bench.step()
    second = bench.add(range(50, 70))
    assert bench.counts(bench.step()) == {first: 1, second: 7}


def test_at_most_so_many_sequences_run() -> None:
    bench = Bench(replace(LIMITS, sequences=2))
    lives = [bench.add(range(10 * i, 10 * i + 3)) for i in range(3)]
    bench.step()
    assert bench.scheduler.running == lives[:2]
    assert len(bench.scheduler.waiting) == 1


def test_prompts_and_decodes_take_turns_when_they_may_not_mix() -> None:
    bench = Bench(replace(LIMITS, mixed=False, chunk_tokens=4))
    first = bench.add(range(3))
    bench.step()
    second = bench.add(range(50, 70))
    plans = [bench.counts(bench.step()) for _ in range(4)]
    assert plans == [{first: 1}, {second: 4}, {first: 1}, {second: 4}]


def test_a_prompt_that_must_not_be_cut_waits_for_a_step_with_room() -> None:
    bench = Bench(replace(LIMITS, chunked=False, mixed=True, tokens=10))
    first, second = bench.add(range(8)), bench.add(range(50, 58))
    assert bench.counts(bench.step()) == {first: 8}
    assert bench.counts(bench.step()) == {first: 1, second: 8}


def test_smaller_priorities_run_first_and_equal_ones_by_arrival() -> None:
    bench = Bench(replace(LIMITS, sequences=1))
    low, high = live_request(range(3)), live_request(range(3))
    low.rank_key, high.rank_key = (1, low.order), (0, high.order)
    bench.scheduler.waiting.add(low)
    bench.scheduler.waiting.add(high)
    assert bench.step().sequences[0].live is high


def test_the_latest_request_gives_way_when_a_decode_cannot_grow() -> None:
    bench = Bench(blocks=block_manager(num_device=6))
    first, second = bench.add(range(6)), bench.add(range(50, 56))
    for _ in range(3):
        bench.step()
    assert bench.scheduler.running == [first, second]
    bench.step()
    assert bench.scheduler.running == [first]
    assert second.state is RequestState.WAITING
    assert second.held.table == []
    bench.blocks.device.check_integrity()


def test_a_preempted_request_keeps_its_place_and_resumes_through_the_cache() -> None:
    bench = Bench(blocks=block_manager(num_device=10))
    first, second = bench.add(range(14)), bench.add(range(50, 64))
    for _ in range(4):
        bench.step()
    assert (second.state, second.num_outputs) == (RequestState.WAITING, 3)
    third = bench.add(range(80, 83))
    bench.blocks.device.release([entry.item.device_block for entry in bench.written])
    bench.scheduler.leave(first)
    bench.blocks.retire(first)
    plan = bench.step()
    assert plan.sequences[0].live is second
    assert plan.sequences[0].start >= 12
    assert third in bench.counts(plan)


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(blocks=block_manager(num_device=9))
    bench.add(range(20))
    big = bench.add(range(50, 70))
    small = bench.add(range(80, 83))
    bench.step()
    assert big.state is RequestState.WAITING
    assert small.state is RequestState.WAITING


def test_a_lone_request_waits_for_write_backs_instead_of_preempting_itself() -> None:
    bench = Bench(blocks=block_manager(num_device=4))
    live = bench.add(range(7))
    bench.step()
    held = bench.blocks.device.lease(1)
    bench.step()
    assert bench.plan().sequences == []
    assert bench.scheduler.running == [live]
    bench.blocks.device.release(held)
    assert bench.counts(bench.step()) == {live: 1}


def test_restores_are_limited_per_step_and_the_next_request_waits_for_its_turn() -> None:
    bench = Bench(replace(LIMITS, restores=4), blocks=block_manager(64, 64))
    first_prompt, second_prompt = list(range(14)), list(range(50, 64))
    bench.host_has(first_prompt)
    bench.host_has(second_prompt)
    first, second = bench.add(first_prompt), bench.add(second_prompt)
    plan = bench.step()
    assert (len(plan.restores), bench.counts(plan)) == (3, {first: 2})
    plan = bench.step()
    assert (len(plan.restores), bench.counts(plan)) == (3, {first: 1, second: 2})


def test_a_match_larger_than_the_whole_budget_is_trimmed() -> None:
    bench = Bench(replace(LIMITS, restores=2))
    prompt = list(range(18))
    bench.host_has(prompt)
    live = bench.add(prompt)
    plan = bench.step()
    assert (len(plan.restores), bench.counts(plan)) == (2, {live: 10})


def test_choices_wait_for_their_leader_and_share_its_blocks() -> None:
    bench = Bench(replace(LIMITS, chunk_tokens=8))
    leader = bench.add(range(14))
    choices = [bench.add(range(14), leader=leader) for _ in range(2)]
    assert bench.counts(bench.step()) == {leader: 8}
    assert bench.counts(bench.step()) == {leader: 6}
    plan = bench.step()
    assert bench.counts(plan) == {leader: 1, choices[0]: 2, choices[1]: 2}
    assert choices[1].held.table[:3] == leader.held.table[:3]


def test_choices_of_a_prompt_shorter_than_a_block_work_too() -> None:
    bench = Bench()
    leader = bench.add([1, 2])
    choice = bench.add([1, 2], leader=leader)
    bench.step()
    assert bench.counts(bench.step()) == {leader: 1, choice: 2}


def test_choices_go_on_alone_when_their_leader_is_gone() -> None:
    bench = Bench(replace(LIMITS, sequences=1))
    other = bench.add(range(50, 53))
    leader = bench.add(range(14))
    choice = bench.add(range(14), leader=leader)
    bench.step()
    bench.scheduler.leave(leader)
    del bench.live[leader.request_id]
    bench.scheduler.leave(other)
    assert bench.counts(bench.step()) == {choice: 14}


def test_a_prompt_waits_for_an_equal_one_that_is_being_computed_if_asked_to() -> None:
    bench = Bench(replace(LIMITS, in_batch=True, chunk_tokens=8))
    first, second = bench.add(range(14)), bench.add(range(14))
    assert bench.counts(bench.step()) == {first: 8}
    assert bench.counts(bench.step()) == {first: 6}
    assert bench.counts(bench.step()) == {first: 1, second: 2}


def test_equal_prompts_are_both_computed_if_not_asked_to_wait() -> None:
    bench = Bench()
    first, second = bench.add(range(14)), bench.add(range(14))
    assert bench.counts(bench.step()) == {first: 14, second: 14}
    assert second.held.table[:3] == first.held.table[:3]


def test_whoever_waits_for_a_preempted_prompt_goes_on() -> None:
    bench = Bench(replace(LIMITS, in_batch=True, chunk_tokens=4))
    first, second = bench.add(range(14)), bench.add(range(14))
    bench.step()
    bench.scheduler.leave(first)
    bench.blocks.retire(first)
    assert second in bench.counts(bench.step())
