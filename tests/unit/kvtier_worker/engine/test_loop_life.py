"""The life of the engine thread: when it is ready, how it drains, what ends it and what its clients then hear."""

from __future__ import annotations

import pytest
from kvtier_worker.engine.frontend import EngineDraining, FinishReason
from kvtier_worker.engine.loop import IDLE_S, EngineLoop
from kvtier_worker.engine.messages import ForwardDone, FromWorker, WorkerFailed
from kvtier_worker.testing.small_simulation import PROMPT, simulation
from kvtier_worker.testing.workers import FakeWorkerGroup


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
