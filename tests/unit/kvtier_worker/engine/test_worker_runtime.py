"""The worker's loop with a link that is two queues: every request is answered exactly once, in a safe order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest
from kvtier_worker.core.ids import BlockId, HostSlot
from kvtier_worker.core.plans import PrefetchItem, RestoreItem, WritebackItem
from kvtier_worker.engine.messages import (
    Forward,
    ForwardDone,
    FromWorker,
    Prefetch,
    PrefetchDone,
    RegisterRestore,
    RestoreRegistered,
    SequenceStep,
    Shutdown,
    StatsRequest,
    StoreProbe,
    StoreProbed,
    TokenOutput,
    ToWorker,
    WorkerFailed,
    WorkerStats,
    Writeback,
    WritebackCopied,
    WritebackStored,
)
from kvtier_worker.engine.ports import GetOutcome, KVCacheStore, LayerGate, StoreBuffer
from kvtier_worker.engine.worker_runtime import RuntimeOptions, WorkerRuntime
from kvtier_worker.errors import ProtocolError
from kvtier_worker.testing.blocks import block_hash
from kvtier_worker.testing.copy import BytesDeviceCache
from kvtier_worker.testing.store import MemoryStore
from kvtier_worker.testing.tiny_worker import (
    NUM_BLOCKS,
    POISON_TOKEN,
    TinyModel,
    next_token,
    tiny_layout,
    tiny_transfer,
)

SIZE = 4
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]
Answer = TypeVar("Answer", bound=FromWorker)


class QueueLink:
    """The engine's end is `ask` and `answer`."""

    def __init__(self) -> None:
        self._requests: queue.Queue[ToWorker | Exception | None] = queue.Queue()
        self.sent: list[FromWorker] = []
        self._news = threading.Condition()

    def receive(self) -> ToWorker | None:
        message = self._requests.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: FromWorker) -> None:
        with self._news:
            self.sent.append(message)
            self._news.notify_all()

    def close(self) -> None:
        self._requests.put(None)

    def ask(self, *messages: ToWorker) -> None:
        for message in messages:
            self._requests.put(message)

    def fail(self, error: Exception) -> None:
        self._requests.put(error)

    def answer(self, kind: type[Answer]) -> Answer:
        """The next answer of a kind, taken out."""
        with self._news:
            assert self._news.wait_for(lambda: any(isinstance(one, kind) for one in self.sent), 10), f"no {kind}"
            found = next(one for one in self.sent if isinstance(one, kind))
            self.sent.remove(found)
            return found


class Running:
    """A runtime whose compute thread is this object's thread."""

    def __init__(
        self, store: KVCacheStore | None = None, *, fatal: bool = False, model: type[TinyModel] = TinyModel
    ) -> None:
        self.link = QueueLink()
        self.cache = BytesDeviceCache(tiny_layout(SIZE), NUM_BLOCKS)
        runtime = WorkerRuntime(
            RuntimeOptions(0, lambda _: fatal, lambda: 123, num_prefetch_threads=2, tidy=self._tidy),
            link=self.link,
            model=model(self.cache, SIZE),
            transfer=tiny_transfer(self.cache, store),
        )
        self.result: list[str] = []
        self.tidied: queue.Queue[tuple[int, bool]] = queue.Queue()
        """Tokens, and whether the answer had been sent by then."""
        self._thread = threading.Thread(target=lambda: self.result.append(runtime.run()))
        self._thread.start()

    def _tidy(self, num_tokens: int) -> None:
        self.tidied.put((num_tokens, any(isinstance(message, ForwardDone) for message in self.link.sent)))

    def join(self) -> str:
        self._thread.join(10)
        assert not self._thread.is_alive(), "the loop does not end"
        return self.result[0]


@pytest.fixture
def worker() -> Iterator[Running]:
    running = Running(MemoryStore())
    yield running
    running.link.ask(Shutdown())
    assert running.join() == ""
    assert running.link.sent == [], "answers that nobody asked for"


def step(tokens: Sequence[int], start: int, table: Sequence[int], request: str = "r") -> SequenceStep:
    return SequenceStep(request, list(tokens), start, list(table), sample=True)


def writeback(job: int, *items: tuple[int, int, int]) -> Writeback:
    return Writeback(
        job, [WritebackItem(BlockId(block), HostSlot(slot), block_hash(number)) for block, slot, number in items]
    )


def prefetch(job: int, *items: tuple[int, int]) -> Prefetch:
    return Prefetch(job, 0, [PrefetchItem(HostSlot(slot), block_hash(number)) for slot, number in items])


def restore(batch: int, *items: tuple[int, int]) -> RegisterRestore:
    return RegisterRestore(batch, [RestoreItem(HostSlot(slot), BlockId(block)) for slot, block in items])


def token(done: ForwardDone) -> int:
    assert done.error == ""
    return done.outputs[0].token_id


def test_a_prompt_gives_the_same_token_cold_from_host_and_from_store(worker: Running) -> None:
    link = worker.link
    link.ask(Forward(1, False, [step(PROMPT, 0, [1, 2, 3])]), writeback(1, (1, 1, 1), (2, 2, 2)))
    cold = token(link.answer(ForwardDone))
    assert cold == next_token(PROMPT)
    assert link.answer(WritebackCopied).count == 2
    assert link.answer(WritebackStored).num_stored == 2
    link.ask(restore(2, (1, 5), (2, 6)), Forward(2, True, [step(PROMPT[8:], 8, [5, 6, 7])]))
    assert link.answer(RestoreRegistered).count == 2
    assert token(link.answer(ForwardDone)) == cold
    link.ask(prefetch(3, (8, 1), (9, 2), (10, 3)))
    done = link.answer(PrefetchDone)
    assert (done.job_id, done.offset, done.hits) == (3, 0, b"\1\1\0")
    link.ask(restore(4, (8, 9), (9, 10)), Forward(4, True, [step(PROMPT[8:], 8, [9, 10, 11])]))
    assert link.answer(RestoreRegistered).error == ""
    assert token(link.answer(ForwardDone)) == cold


def test_a_forward_is_answered_before_anybody_tidies_up_after_it(worker: Running) -> None:
    worker.link.ask(Forward(1, False, [step(PROMPT, 0, [1, 2, 3]), step(PROMPT[:4], 0, [4], "s")]))
    assert worker.tidied.get(timeout=10) == (len(PROMPT) + 4, True)
    worker.link.answer(ForwardDone)


def test_a_writeback_copies_what_the_forward_sent_before_it_wrote(worker: Running) -> None:
    """Sent together, copied behind the forward; the device blocks may be overwritten once it is answered."""
    link = worker.link
    other = [token_id + 100 for token_id in PROMPT]
    link.ask(Forward(1, False, [step(PROMPT, 0, [1, 2, 3])]), writeback(1, (1, 1, 1), (2, 2, 2)))
    assert link.answer(WritebackCopied).count == 2
    link.ask(Forward(2, False, [step(other, 0, [1, 2, 3])]), restore(3, (1, 5), (2, 6)))
    link.ask(Forward(3, True, [step(PROMPT[8:], 8, [5, 6, 7])]))
    tokens = [token(link.answer(ForwardDone)) for _ in range(3)]
    assert tokens == [next_token(PROMPT), next_token(other), next_token(PROMPT)]
    link.answer(RestoreRegistered)
    link.answer(WritebackStored)


def test_a_refused_restore_is_answered_and_its_forward_does_not_compute(worker: Running) -> None:
    link = worker.link
    link.ask(restore(1, (0, 5)), Forward(1, True, [step(PROMPT, 0, [1, 2, 3])]))
    refused = link.answer(RestoreRegistered)
    assert refused.count == 0
    assert "host slot 0" in refused.error
    done = link.answer(ForwardDone)
    assert "never registered" in done.error
    assert done.outputs == []


def test_tokens_of_a_model_that_did_not_wait_for_its_restore_are_thrown_away() -> None:
    class Careless(TinyModel):
        def forward(self, sequences: Sequence[SequenceStep], gate: LayerGate | None) -> Sequence[TokenOutput]:
            return super().forward(sequences, None)

    running = Running(model=Careless)
    running.link.ask(restore(1, (1, 5)), Forward(1, True, [step(PROMPT[:5], 0, [5, 6])]), Shutdown())
    done = running.link.answer(ForwardDone)
    assert "never waited" in done.error
    assert done.outputs == []
    assert running.join() == ""


def test_a_refused_writeback_gets_both_answers(worker: Running) -> None:
    link = worker.link
    link.ask(writeback(5, (0, 1, 1)))
    copied = link.answer(WritebackCopied)
    assert (copied.job_id, copied.count) == (5, 0)
    assert "device block 0" in copied.error
    assert link.answer(WritebackStored).num_failed == 1


def test_a_forward_that_raises_is_answered_and_the_next_one_works(worker: Running) -> None:
    link = worker.link
    link.ask(restore(1, (1, 5)), Forward(1, True, [step([POISON_TOKEN], 4, [5, 6])]))
    link.ask(Forward(2, False, [step(PROMPT, 0, [1, 2, 3])]))
    link.answer(RestoreRegistered)
    assert "cannot bear" in link.answer(ForwardDone).error
    assert token(link.answer(ForwardDone)) == next_token(PROMPT)
    link.ask(StatsRequest(1))
    assert link.answer(WorkerStats).faults == []


def test_a_store_that_raises_is_a_miss() -> None:
    class Broken(MemoryStore):
        def exists(self, keys: Sequence[str]) -> Sequence[bool]:
            raise OSError("boom")

    running = Running(Broken())
    running.link.ask(prefetch(1, (1, 1), (2, 2)), StoreProbe(2, [block_hash(1)]))
    done = running.link.answer(PrefetchDone)
    assert (done.hits, done.num_faults) == (b"\0\0", 2)
    assert not running.link.answer(StoreProbed).available
    running.link.ask(Shutdown())
    assert running.join() == ""


def test_a_slow_read_holds_up_neither_forwards_nor_other_reads() -> None:
    go_on, inside = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
            if any(buffer.key.endswith(block_hash(1).hex()) for buffer in buffers):
                inside.set()
                assert go_on.wait(10)
            return super().get(buffers)

    running = Running(Slow())
    link = running.link
    link.ask(Forward(1, False, [step(PROMPT, 0, [1, 2, 3])]), writeback(1, (1, 1, 1), (2, 2, 2)))
    link.answer(WritebackStored)
    link.ask(prefetch(2, (8, 1)))
    assert inside.wait(10)
    link.ask(prefetch(3, (9, 2)), Forward(2, False, [step(PROMPT, 0, [1, 2, 3])]))
    assert link.answer(PrefetchDone).job_id == 3
    link.answer(ForwardDone)
    link.answer(ForwardDone)
    link.ask(Shutdown())
    go_on.set()
    assert running.join() == ""
    assert link.answer(PrefetchDone).job_id == 2, "shutdown finishes what is in flight"


def test_a_probe_says_what_the_store_holds(worker: Running) -> None:
    link = worker.link
    link.ask(writeback(1, (1, 1, 1)))
    link.answer(WritebackCopied)
    link.answer(WritebackStored)
    link.ask(StoreProbe(7, [block_hash(1), block_hash(2)]))
    probed = link.answer(StoreProbed)
    assert (probed.job_id, probed.exists, probed.available) == (7, b"\1\0", True)


def test_stats_carry_counters_and_state(worker: Running) -> None:
    worker.link.ask(StatsRequest(4))
    stats = worker.link.answer(WorkerStats)
    assert (stats.job_id, stats.resident_bytes, stats.store_state, stats.faults) == (4, 123, "closed", [])


def test_a_fatal_exception_is_answered_and_ends_the_loop() -> None:
    running = Running(fatal=True)
    running.link.ask(Forward(1, False, [step([POISON_TOKEN], 0, [1])]), Forward(2, False, [step(PROMPT, 0, [1, 2, 3])]))
    assert "cannot bear" in running.link.answer(ForwardDone).error
    assert "cannot bear" in running.join()
    late = [message for message in running.link.sent if isinstance(message, ForwardDone)]
    assert all(done.error and not done.outputs for done in late), "nothing is computed out of step"
    assert "cannot bear" in running.link.answer(WorkerFailed).error


@pytest.mark.parametrize("error", [ProtocolError("not a request"), RuntimeError("not a request")])
def test_a_message_that_makes_no_sense_ends_the_loop(error: Exception) -> None:
    running = Running()
    running.link.fail(error)
    assert "not a request" in running.join()
    assert isinstance(running.link.sent[-1], WorkerFailed)


def test_an_engine_that_is_gone_ends_the_loop_in_order() -> None:
    running = Running(MemoryStore())
    running.link.ask(writeback(1, (1, 1, 1)))
    running.link.close()
    assert running.join() == ""
    assert running.link.answer(WritebackStored).num_stored == 1
