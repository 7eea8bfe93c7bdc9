"""The engine thread over fake workers, one behaviour at a time; random schedules are in ``tests/sim``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import (
    EngineBusy,
    EngineDraining,
    EngineRequest,
    FinishReason,
    PromptTooLong,
    RequestOutput,
)
from kvtier_worker.engine.loop import IDLE_S, EngineLoop
from kvtier_worker.engine.messages import (
    Forward,
    ForwardDone,
    FromWorker,
    Prefetch,
    RegisterRestore,
    StoreProbe,
    WorkerFailed,
    Writeback,
)
from kvtier_worker.testing.simulation import Client, Simulation
from kvtier_worker.testing.symbolic import continuation
from kvtier_worker.testing.workers import FakeStore, FakeWorkerGroup

PROMPT = list(range(100, 130))  # seven full blocks of 4 and two tokens
SETTINGS = WorkerSettings(model="models/tiny", block_size=4, enable_kvcache_store=True)


def simulation(*, workers: FakeWorkerGroup | None = None, **flags: object) -> Simulation:
    return Simulation(replace(SETTINGS, **flags), workers or FakeWorkerGroup())  # type: ignore[arg-type]


def drop(sim: Simulation, *tiers: Tier) -> None:
    future = sim.engine.drop_caches(frozenset(tiers))
    sim.run()
    assert set(future.result(0)) == set(tiers)


def cached(client: Client) -> tuple[int, int, int]:
    return client.cached[Tier.DEVICE], client.cached[Tier.HOST], client.cached[Tier.STORE]


def sent(sim: Simulation, kind: type) -> Sequence[object]:
    return [message for message in sim.workers.sent if isinstance(message, kind)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_same_prompt_is_answered_alike_cold_from_device_host_and_store(num_ranks: int) -> None:
    store: FakeStore = {}
    sim = simulation(workers=FakeWorkerGroup(num_ranks=num_ranks, store=store))
    found = []
    for number, tiers in enumerate([(), (), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)]):
        if tiers:
            drop(sim, *tiers)
        client = sim.submit(f"r{number}", PROMPT)
        sim.run()
        found.append(cached(client))
    assert found == [(0, 0, 0), (28, 0, 0), (0, 28, 0), (0, 0, 28)]
    restarted = simulation(workers=FakeWorkerGroup(num_ranks=num_ranks, store=store, seed=5))
    client = restarted.submit("again", PROMPT)
    restarted.run()
    assert cached(client) == (0, 0, 28)


def test_a_restore_is_registered_before_its_forward() -> None:
    sim = simulation()
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    sim.workers.sent.clear()
    sim.submit("b", PROMPT)
    sim.run()
    first, second = [m for m in sim.workers.sent if isinstance(m, RegisterRestore | Forward)][:2]
    assert isinstance(first, RegisterRestore)
    assert isinstance(second, Forward)
    assert (second.batch_id, second.has_restore) == (first.batch_id, True)


def test_blocks_are_written_back_while_the_request_still_runs() -> None:
    sim = simulation(max_tokens_per_chunk_for_prefill=8)
    client = sim.submit("a", PROMPT, max_tokens=20)
    while client.reason is None:
        sim.turn()
    jobs = sent(sim, Writeback)
    assert len(jobs) > 3
    sim.run()
    hashes = [item.block_hash for job in sent(sim, Writeback) for item in job.items]  # type: ignore[attr-defined]
    assert len(hashes) == len(set(hashes)) == (30 + 20 - 1) // 4


def test_the_host_alone_works_without_a_store() -> None:
    sim = simulation(enable_kvcache_store=False)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    client = sim.submit("b", PROMPT)
    sim.run()
    assert cached(client) == (0, 28, 0)
    assert not sent(sim, Prefetch)


def test_the_device_alone_works_without_a_host() -> None:
    sim = simulation(workers=FakeWorkerGroup(num_host_slots=0), enable_kvcache_store=False)
    sim.submit("a", PROMPT)
    sim.run()
    client = sim.submit("b", PROMPT)
    sim.run()
    assert cached(client) == (28, 0, 0)
    assert not sent(sim, Writeback)


def test_a_prefetching_request_does_not_hold_up_the_one_behind_it() -> None:
    workers = FakeWorkerGroup()
    workers.delays.prefetch = 5.0
    sim = simulation(workers=workers)
    slow, fast = sim.submit("slow", PROMPT), sim.submit("fast", [1, 2, 3])
    while fast.reason is None:
        sim.turn()
    assert slow.first_at is None
    sim.run()
    assert slow.reason is FinishReason.LENGTH


def test_nobody_waits_longer_than_the_prefetch_timeout_and_what_is_in_flight() -> None:
    workers = FakeWorkerGroup(num_device_blocks=200, num_host_slots=400)
    sim = simulation(workers=workers, prefetch_timeout=50, prefetch_batch_size=1)
    long_prompt = list(range(400))
    sim.submit("warm", long_prompt)
    sim.run()
    drop(sim, Tier.DEVICE, Tier.HOST)
    workers.delays.prefetch = 0.030
    client = sim.submit("late", long_prompt)
    sim.run()
    assert client.first_at is not None
    in_flight = 2 * 1.5 * workers.delays.prefetch
    assert client.first_at - client.submitted < 0.050 + in_flight + 1.5 * workers.delays.forward + 0.01
    assert 0 < client.cached[Tier.STORE] < 396


def test_a_dead_store_is_not_asked_again_until_it_is_worth_a_try() -> None:
    workers = FakeWorkerGroup()
    workers.faults.store_down = True
    sim = simulation(workers=workers)
    sim.submit("a", PROMPT)
    sim.run()
    asked = len(sent(sim, Prefetch))
    sim.submit("b", [*PROMPT, 1, 2, 3])
    drop(sim, Tier.DEVICE, Tier.HOST)
    sim.submit("c", PROMPT)
    sim.run()
    assert len(sent(sim, Prefetch)) == asked
    workers.faults.store_down = False
    workers.at(workers.now + 10, lambda: sim.submit("d", list(range(40))))
    sim.run()
    assert len(sent(sim, Prefetch)) > asked


def test_cancelling_at_any_point_gives_everything_back() -> None:
    for delay in (0.0, 0.003, 0.011, 0.02, 0.05):
        sim = simulation(workers=FakeWorkerGroup(seed=3))
        client = sim.submit("a", PROMPT, max_tokens=40)
        sim.workers.at(delay, lambda sim=sim: sim.cancel("a"))  # type: ignore[misc]
        sim.run()
        assert client.reason is FinishReason.CANCELLED
        assert sim.engine.idle


def test_cancelling_twice_or_what_is_unknown_does_nothing() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    sim.turn()
    for _ in range(3):
        sim.cancel("a")
    sim.cancel("nobody")
    sim.run()
    assert [output.finish_reason for output in client.outputs] == [FinishReason.CANCELLED]


def test_a_failed_restore_is_computed_instead() -> None:
    workers = FakeWorkerGroup()
    sim = simulation(workers=workers)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    workers.faults.restore_aborts = 1.0
    client = sim.submit("b", PROMPT)
    sim.run()
    assert client.reason is FinishReason.LENGTH
    assert cached(client) == (0, 0, 0)


@pytest.mark.parametrize("fault", ["registers_short", "restore_aborts"])
def test_a_step_whose_restore_went_wrong_takes_everybody_in_it_back(fault: str) -> None:
    workers = FakeWorkerGroup(num_ranks=2)
    sim = simulation(workers=workers)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    setattr(workers.faults, fault, 1.0)
    clients = [sim.submit(name, PROMPT) for name in ("b", "c")]
    clients.append(sim.submit("d", [1, 2, 3]))
    sim.run()
    assert [client.reason for client in clients] == [FinishReason.LENGTH] * 3


def test_a_step_that_keeps_failing_ends_its_requests_with_an_error() -> None:
    workers = FakeWorkerGroup()
    workers.faults.forward_fails = 1.0
    sim = simulation(workers=workers)
    client = sim.submit("a", PROMPT)
    sim.run()
    assert client.reason is FinishReason.ERROR
    assert "3 times" in client.outputs[-1].error
    workers.faults.forward_fails = 0.0
    assert sim.submit("b", PROMPT).reason is None
    sim.run()


def test_stop_ids_and_limits_end_a_sequence() -> None:
    sim = simulation()
    answer = continuation(PROMPT, 5, sim.workers.vocab_size)
    stopped = sim.submit("a", PROMPT, max_tokens=5, stop_token_ids=(answer[2],))
    limited = sim.submit("b", PROMPT, max_tokens=5)
    sim.run()
    assert (stopped.tokens, stopped.reason) == (answer[:3], FinishReason.STOP)
    assert (limited.tokens, limited.reason) == (answer, FinishReason.LENGTH)


def test_the_end_of_sequence_token_stops_unless_it_is_ignored() -> None:
    answer = continuation(PROMPT, 5, 997)
    sim = simulation(workers=FakeWorkerGroup(eos_token_ids=(answer[1],)))
    outputs: list[RequestOutput] = []
    sim.submit("a", PROMPT, max_tokens=5)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    sim.engine.submit(EngineRequest(RequestId("b"), tuple(PROMPT), params), outputs.append)
    sim.run()
    assert sim.clients["a"].tokens == answer[:2]
    assert [token for output in outputs for token in output.token_ids] == answer


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    sim = simulation(workers=FakeWorkerGroup(num_device_blocks=5))
    with pytest.raises(PromptTooLong, match=r"30 tokens.*15"):
        sim.submit("a", PROMPT)
    longest = sim.submit("b", PROMPT[:15], max_tokens=50)
    sim.run()
    assert (len(longest.tokens), longest.reason) == (1, FinishReason.LENGTH)


def test_a_prompt_that_may_not_be_cut_must_fit_a_step() -> None:
    sim = simulation(enable_chunked_prefill=False, max_tokens_per_batch=20)
    with pytest.raises(PromptTooLong, match=r"30 tokens.*20"):
        sim.submit("a", PROMPT)


def test_too_many_requests_are_refused_before_any_prefetch() -> None:
    sim = simulation(max_concurrent_requests=1)
    sim.submit("a", PROMPT)
    with pytest.raises(EngineBusy, match="max_concurrent_requests"):
        sim.submit("b", PROMPT)
    sim.submit("a.1", PROMPT, leader="a")
    sim.run()
    sim.submit("c", PROMPT)
    sim.run()


def test_a_full_queue_refuses_too() -> None:
    sim = simulation(request_queue_size=1)
    sim.submit("a", PROMPT)
    with pytest.raises(EngineBusy, match="request_queue_size"):
        sim.submit("b", PROMPT)


def test_an_id_that_is_live_already_is_refused_and_the_first_one_lives_on() -> None:
    sim = simulation()
    first = sim.submit("a", PROMPT)
    second = sim.submit("a", PROMPT)
    sim.clients["first"] = first
    sim.run()
    assert second.reason is FinishReason.ERROR
    assert "live already" in second.outputs[0].error
    assert first.reason is FinishReason.LENGTH


def test_choices_share_the_prompt_of_the_first_one() -> None:
    sim = simulation()
    sim.submit("a", PROMPT)
    choice = sim.submit("a.1", PROMPT, leader="a")
    sim.run()
    assert cached(choice) == (28, 0, 0)


def test_a_probe_tells_what_each_tier_holds_and_changes_nothing() -> None:
    workers = FakeWorkerGroup(num_ranks=2)
    sim = simulation(workers=workers)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    key = next(key for key in workers.store if key[0] == 1)
    del workers.store[key]
    future = sim.engine.probe(tuple(PROMPT))
    sim.run()
    report = future.result(0)
    assert (report.full_blocks, report.device_blocks, report.host_blocks, report.store_blocks) == (7, 0, 7, 6)
    assert report.store_available


def test_a_probe_of_a_dead_store_says_so() -> None:
    workers = FakeWorkerGroup()
    workers.faults.store_down = True
    sim = simulation(workers=workers)
    future = sim.engine.probe(tuple(PROMPT))
    sim.run()
    assert not future.result(0).store_available
    without = simulation(enable_kvcache_store=False)
    asked = without.engine.probe(tuple(PROMPT))
    without.run()
    assert not asked.result(0).store_available
    assert not sent(without, StoreProbe)


def test_integrity_reports_every_pool_and_every_worker() -> None:
    sim = simulation(workers=FakeWorkerGroup(num_ranks=2))
    sim.submit("a", PROMPT)
    future = sim.engine.integrity()
    sim.run()
    reports = future.result(0)
    assert [(report.name, report.ok) for report in reports] == [
        ("device", True),
        ("host", True),
        ("worker 0", True),
        ("worker 1", True),
    ]


def test_a_drop_waits_for_write_backs_so_that_nothing_reappears() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    while client.reason is None:
        sim.turn()
    future = sim.engine.drop_caches(frozenset({Tier.DEVICE, Tier.HOST}))
    sim.turn()
    assert not future.done()
    sim.run()
    report = sim.engine.probe(tuple(PROMPT))
    sim.run()
    assert (report.result(0).device_blocks, report.result(0).host_blocks) == (0, 0)


def test_draining_finishes_what_runs_flushes_and_refuses_the_rest() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    sim.turn()
    future = sim.engine.drain()
    with pytest.raises(EngineDraining):
        sim.submit("b", PROMPT)
    assert sim.engine.health().alive
    assert not sim.engine.health().ready
    sim.run()
    assert future.done()
    assert client.reason is FinishReason.LENGTH
    assert len(sim.workers.store) == 8


def test_draining_cancels_what_takes_too_long() -> None:
    sim = simulation(drain_timeout=100)
    client = sim.submit("a", PROMPT, max_tokens=150)
    sim.turn()
    future = sim.engine.drain()
    sim.run()
    assert future.done()
    assert client.reason is FinishReason.CANCELLED
    assert sim.workers.now < 1.0 + 5.0


def test_after_a_drain_the_thread_sleeps_again() -> None:
    sim = simulation(drain_timeout=100)
    sim.submit("a", PROMPT)
    sim.engine.drain()
    sim.run()
    sim.workers.now += 1.0
    before = sim.workers.now
    sim.turn()
    assert sim.workers.now == before + IDLE_S


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_client_that_cannot_take_its_outputs_ends_alone(failing: int) -> None:
    sim = simulation()
    taken: list[RequestOutput] = []

    def sink(output: RequestOutput) -> None:
        taken.append(output)
        if len(taken) == failing:
            raise RuntimeError("the client's side is broken")

    params = SamplingParams(max_tokens=4, temperature=0.0)
    sim.engine.submit(EngineRequest(RequestId("broken"), tuple(PROMPT), params), sink)
    sound = sim.submit("sound", PROMPT)
    sim.run()
    assert sound.reason is FinishReason.LENGTH
    assert len(taken) == failing
    assert sim.engine.metrics.registry.get_sample_value("engine_failed_sinks_total") == 1


def test_a_rank_that_never_answers_a_step_is_a_dead_worker() -> None:
    class OneRankHangs(FakeWorkerGroup):
        def _answer(self, message: FromWorker) -> None:
            if not (isinstance(message, ForwardDone) and message.rank == 1):
                super()._answer(message)

    sim = simulation(workers=OneRankHangs(num_ranks=2), max_tokens_per_batch=16, max_seqs_per_batch=16)
    client = sim.submit("a", PROMPT)
    reason = sim.engine.run()
    assert reason.startswith("no answer from ranks [1] to a step of 16 tokens in 3")
    assert client.reason is FinishReason.ERROR
    assert sim.engine.fatal == reason
    assert 300 <= sim.workers.now < 300 + 16 + 2 * IDLE_S


def test_a_dead_worker_ends_everything_with_an_error() -> None:
    sim = simulation()
    running, waiting = sim.submit("a", PROMPT, max_tokens=50), sim.submit("b", PROMPT)
    sim.workers.at(0.03, lambda: setattr(sim.workers, "dead", "rank 0 was killed"))
    future = sim.engine.integrity()
    assert sim.engine.run() == "rank 0 was killed"
    assert [client.reason for client in (running, waiting)] == [FinishReason.ERROR] * 2
    assert not sim.engine.health().alive
    assert sim.engine.fatal == "rank 0 was killed"
    late = sim.engine.integrity()
    assert late.done()
    assert future.done()
    with pytest.raises(EngineDraining, match="rank 0 was killed"):
        sim.submit("c", PROMPT)


def test_a_worker_that_gives_up_is_a_dead_worker() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    sim.workers.at(0.0, lambda: sim.workers._answer(WorkerFailed(0, "out of memory")))
    assert sim.engine.run() == "worker 0 failed: out of memory"
    assert client.reason is FinishReason.ERROR


def test_a_bug_in_the_engine_thread_hangs_no_client() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    sim.workers.at(0.0, lambda: sim.workers._answer(object()))  # type: ignore[arg-type]
    assert "engine thread failed" in sim.engine.run()
    assert client.reason is FinishReason.ERROR


def test_stop_ends_the_thread_and_is_no_failure() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT)
    sim.engine.stop()
    assert sim.engine.run() == ""
    assert client.reason is FinishReason.ERROR
    assert "stopped" in client.outputs[-1].error


def test_an_engine_that_has_not_turned_yet_is_starting() -> None:
    sim = simulation()
    assert sim.engine.health().reason == "starting"
    sim.turn()
    assert sim.engine.health().ready


def test_an_engine_without_work_is_ready_at_once() -> None:
    sim = simulation()
    turns: list[float] = []

    def turn() -> None:
        EngineLoop.turn(sim.engine)
        turns.append(sim.workers.now)
        sim.engine.stop()

    sim.engine.turn = turn  # type: ignore[method-assign]
    sim.engine.run()
    assert turns[0] == 0.0
    assert sim.engine.health().reason == "the engine stopped"


def test_a_silent_thread_is_not_alive() -> None:
    sim = simulation()
    sim.turn()
    sim.workers.now += 1000
    assert not sim.engine.health().alive


def test_facts_of_the_engine_follow_from_settings_and_workers() -> None:
    info = simulation(max_model_len=100).engine.info
    assert (info.model_id, info.max_model_len, info.block_size, info.tp_size) == ("tiny", 100, 4, 1)
    assert simulation().engine.info.max_model_len == 63 * 4


def test_admission_counts_return_to_zero_when_every_client_cancels() -> None:
    sim = simulation(max_concurrent_requests=6)
    for _ in range(3):
        for number in range(6):
            sim.submit(f"r{number}", [*PROMPT, number])
        sim.turn()
        for number in range(6):
            sim.cancel(f"r{number}")
        sim.run()


def test_prompt_tokens_are_conserved_over_the_tiers() -> None:
    sim = simulation()
    for number, tiers in enumerate([(), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST), ()]):
        if tiers:
            drop(sim, *tiers)
        sim.submit(f"r{number}", PROMPT)
        sim.run()
    value = sim.engine.metrics.registry.get_sample_value
    by_tier = {tier: value("prompt_tokens_cached_total", {"tier": tier}) for tier in Tier}
    assert by_tier == {Tier.DEVICE: 28, Tier.HOST: 28, Tier.STORE: 28}
    assert value("prompt_tokens_total") == 120
    assert value("prompt_tokens_computed_total") == 120 - 3 * 28
    assert value("cache_prefetch_requests_total", {"outcome": "hit"}) == 1
    assert value("num_running_requests") == 0


def test_a_restore_that_costs_more_than_computing_is_not_done() -> None:
    sim = simulation(enable_restore_cost_gate=True)
    gate = sim.engine._gate
    gate._prefill = gate._prefill.observe(1_000_000, 1.0)
    gate._restores[0] = gate._prefill.__class__().observe(1, 1.0)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    client = sim.submit("b", PROMPT)
    sim.run()
    assert cached(client) == (0, 0, 0)
