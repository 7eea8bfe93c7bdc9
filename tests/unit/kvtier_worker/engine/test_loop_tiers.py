"""The engine thread and the tiers: where a prompt's tokens come from, where blocks go, what a probe and a drop see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvtier_worker.core.ids import Tier
from kvtier_worker.engine.frontend import FinishReason
from kvtier_worker.engine.messages import Forward, Prefetch, RegisterRestore, StoreProbe, Writeback
from kvtier_worker.testing.simulation import Client, Simulation
from kvtier_worker.testing.small_simulation import PROMPT, simulation
from kvtier_worker.testing.workers import FakeStore, FakeWorkerGroup


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


def test_a_restore_that_always_fails_costs_one_step_and_ends_no_request() -> None:
    """Of several that share its blocks each would try it in turn, with the others and a bystander in the same step."""
    workers = FakeWorkerGroup()
    sim = simulation(workers=workers)
    sim.submit("a", PROMPT)
    sim.run()
    drop(sim, Tier.DEVICE)
    workers.faults.restore_aborts = 1.0
    bystander = sim.submit("bystander", [1, 2, 3], max_tokens=40)
    while not bystander.tokens:
        sim.turn()
    sharers = [sim.submit(f"s{number}", PROMPT) for number in range(4)]
    sim.run()
    assert [client.reason for client in (bystander, *sharers)] == [FinishReason.LENGTH] * 5
    assert sim.engine.metrics.registry.get_sample_value("engine_failed_steps_total") == 1


def test_failed_restores_of_others_are_not_held_against_a_request() -> None:
    """Five of them in a row, each in the step after the one before."""
    workers = FakeWorkerGroup(num_device_blocks=128)
    sim = simulation(workers=workers)
    prompts = [[number, *PROMPT] for number in range(5)]
    for number, prompt in enumerate(prompts):
        sim.submit(f"a{number}", prompt)
    sim.run()
    drop(sim, Tier.DEVICE)
    workers.faults.restore_aborts = 1.0
    bystander = sim.submit("bystander", [1, 2, 3], max_tokens=40)
    while not bystander.tokens:
        sim.turn()
    for number, prompt in enumerate(prompts):
        sim.submit(f"b{number}", prompt)
        seen = len(sent(sim, RegisterRestore))
        while len(sent(sim, RegisterRestore)) == seen:
            sim.turn()
    assert sim.engine.metrics.registry.get_sample_value("engine_failed_steps_total") == 4
    assert len(bystander.tokens) < 5, "it made progress in between"
    sim.run()
    assert {client.reason for client in sim.clients.values()} == {FinishReason.LENGTH}


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


def test_choices_share_the_prompt_of_the_first_one() -> None:
    sim = simulation()
    sim.submit("a", PROMPT)
    choice = sim.submit("a.1", PROMPT, leader="a")
    sim.run()
    assert cached(choice) == (28, 0, 0)


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
