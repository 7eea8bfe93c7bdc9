"""What the HTTP front may rely on, held against the engine thread and against the scripted engine of its tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat

import pytest
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import (
    EngineBusy,
    EngineClient,
    EngineDraining,
    EngineRequest,
    FinishReason,
    PromptTooLong,
    RequestOutput,
)
from kvtier_worker.engine.loop import EngineLoop
from kvtier_worker.testing.engine import DEFAULT_INFO, ScriptedEngine
from kvtier_worker.testing.workers import FakeWorkerGroup

BLOCK = 4
LONGEST = 128
LIMIT = 3
WAIT_S = 20.0

World = Callable[[], AbstractContextManager[EngineClient]]


@contextmanager
def scripted() -> Iterator[EngineClient]:
    info = replace(DEFAULT_INFO, max_model_len=LONGEST, block_size=BLOCK)
    with ScriptedEngine(lambda _: repeat(7), info, limit=LIMIT, step_s=0.001) as engine:
        yield engine


@contextmanager
def engine_thread() -> Iterator[EngineClient]:
    settings = WorkerSettings(model="/m/fake", block_size=BLOCK, max_concurrent_requests=LIMIT, drain_timeout=100_000)
    workers = FakeWorkerGroup(block_size=BLOCK, num_host_slots=0, max_position=LONGEST)
    engine = EngineLoop(settings, workers, workers.clock)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        until(lambda: engine.health().ready)
        yield engine
    finally:
        engine.stop()
        thread.join()


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=[scripted, engine_thread])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    world: World = request.param
    with world() as client:
        yield client


@dataclass
class Sequence:
    """One submitted sequence and what came of it."""

    request: EngineRequest
    outputs: list[RequestOutput] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def sink(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def submit_to(self, engine: EngineClient) -> Sequence:
        engine.submit(self.request, self.sink)
        return self

    def wait(self) -> FinishReason | None:
        assert self.ended.wait(WAIT_S)
        return self.outputs[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


def sequence(name: str, prompt: int = 9, max_tokens: int = 5) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Sequence(EngineRequest(RequestId(name), tuple(range(1, prompt + 1)), params))


def test_every_request_ends_once_and_after_its_tokens(engine: EngineClient) -> None:
    sequences = [sequence(f"{number}", max_tokens=number + 1).submit_to(engine) for number in range(LIMIT)]
    for number, one in enumerate(sequences):
        assert one.wait() is FinishReason.LENGTH
        assert len(one.tokens) == number + 1
        assert [output.finish_reason for output in one.outputs[:-1]] == [None] * (len(one.outputs) - 1)
        assert {output.request_id for output in one.outputs} == {f"{number}"}


def test_a_cancelled_request_ends_as_cancelled_and_cancelling_is_idempotent(engine: EngineClient) -> None:
    one = sequence("one", max_tokens=110).submit_to(engine)
    until(lambda: bool(one.outputs) or one.ended.is_set())
    engine.cancel(RequestId("one"))
    engine.cancel(RequestId("one"))
    engine.cancel(RequestId("never seen"))
    assert one.wait() in (FinishReason.CANCELLED, FinishReason.LENGTH)  # it may have ended just before
    assert sequence("two").submit_to(engine).wait() is FinishReason.LENGTH


def test_a_prompt_that_can_never_fit_is_refused_without_an_output(engine: EngineClient) -> None:
    one = sequence("long", prompt=LONGEST)
    with pytest.raises(PromptTooLong, match=f"{LONGEST}"):
        one.submit_to(engine)
    assert one.outputs == []


def test_a_full_engine_is_busy_and_takes_requests_again_later(engine: EngineClient) -> None:
    running: list[Sequence] = []
    with suppress(EngineBusy):
        running.extend(sequence(f"{number}", max_tokens=110).submit_to(engine) for number in range(1000))
    assert LIMIT <= len(running) < 1000
    for one in running:
        one.wait()
    until(lambda: accepts(engine))


def accepts(engine: EngineClient) -> bool:
    try:
        sequence("again").submit_to(engine).wait()
    except EngineBusy:
        return False
    return True


def test_a_second_prompt_is_cached_on_the_device_until_it_is_dropped(engine: EngineClient) -> None:
    prompt = sequence("first").submit_to(engine)
    prompt.wait()
    assert prompt.outputs[-1].cached_tokens.get(Tier.DEVICE, 0) == 0
    second = sequence("second").submit_to(engine)
    second.wait()
    assert second.outputs[-1].cached_tokens[Tier.DEVICE] == 8
    ids = prompt.request.prompt_token_ids
    for _ in range(2):  # a probe changes nothing
        report = engine.probe(ids).result(WAIT_S)
        assert (report.prompt_tokens, report.full_blocks, report.block_size) == (9, 2, BLOCK)
        assert (report.device_blocks, report.host_blocks, report.store_blocks) == (2, 0, 0)
    assert engine.drop_caches(frozenset({Tier.DEVICE})).result(WAIT_S)[Tier.DEVICE] >= 2
    assert engine.probe(ids).result(WAIT_S).device_blocks == 0


def test_an_idle_engine_accounts_for_every_block(engine: EngineClient) -> None:
    sequence("one").submit_to(engine).wait()
    for pool in engine.integrity().result(WAIT_S):
        assert pool.ok, pool
        assert pool.leased == 0
        assert pool.free + pool.leased + pool.cached == pool.usable


def test_a_drained_engine_has_finished_what_ran_and_refuses_the_rest(engine: EngineClient) -> None:
    assert engine.health().ready
    one = sequence("one", max_tokens=60).submit_to(engine)
    drained = engine.drain()
    drained.result(WAIT_S)
    assert one.ended.is_set()
    assert len(one.tokens) == 60
    assert engine.health().alive
    assert not engine.health().ready
    assert engine.health().reason
    with pytest.raises(EngineDraining):
        sequence("two").submit_to(engine)
    engine.drain().result(WAIT_S)
