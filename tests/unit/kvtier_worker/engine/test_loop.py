"""The engine thread over fake workers: which requests it takes, how each ends. Random schedules: ``tests/sim``."""

from __future__ import annotations

import pytest
from kvtier_worker.core.ids import RequestId
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import EngineBusy, EngineRequest, FinishReason, PromptTooLong, RequestOutput
from kvtier_worker.testing.small_simulation import PROMPT, simulation
from kvtier_worker.testing.symbolic import continuation
from kvtier_worker.testing.workers import FakeWorkerGroup


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


def test_a_request_that_a_stop_string_ended_counts_as_stopped() -> None:
    sim = simulation()
    client = sim.submit("a", PROMPT, max_tokens=20)
    gone = sim.submit("b", PROMPT, max_tokens=20)
    while len(client.tokens) < 3:
        sim.turn()
    client.expected = client.tokens  # what a front shows ends here
    sim.cancel("a", FinishReason.STOP)
    sim.cancel("b")
    sim.run()
    assert (client.reason, gone.reason) == (FinishReason.STOP, FinishReason.CANCELLED)
    counted = sim.engine.metrics.registry.get_sample_value
    assert [counted("requests_total", {"reason": reason}) for reason in ("stop", "cancelled")] == [1, 1]


def test_admission_counts_return_to_zero_when_every_client_cancels() -> None:
    sim = simulation(max_concurrent_requests=6)
    for _ in range(3):
        for number in range(6):
            sim.submit(f"r{number}", [*PROMPT, number])
        sim.turn()
        for number in range(6):
            sim.cancel(f"r{number}")
        sim.run()


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


def test_facts_of_the_engine_follow_from_settings_and_workers() -> None:
    info = simulation(max_model_len=100).engine.info
    assert (info.model_id, info.max_model_len, info.block_size, info.tp_size) == ("tiny", 100, 4, 1)
    assert simulation().engine.info.max_model_len == 63 * 4
