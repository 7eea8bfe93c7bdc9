from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvtier_worker.core.ids import BatchId
from kvtier_worker.core.lifecycle import RequestEvent, RequestState
from kvtier_worker.engine.admission import Admission
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.messages import Prefetch, PrefetchDone
from kvtier_worker.engine.prefetch_job import PrefetchOutcome, PrefetchReport
from kvtier_worker.engine.requests import LiveRequest
from kvtier_worker.testing.live import block_manager, live_request

PROMPT = list(range(100, 122))  # five usable blocks of 4


def state(live: LiveRequest) -> RequestState:
    return live.state


@dataclass
class Desk:
    """An admission desk with its messages and whom it let through."""

    num_ranks: int = 1
    batch_size: int = 2
    timeout_s: float | None = None
    blocks: TieredBlockManager = field(default_factory=block_manager)
    sent: list[Prefetch] = field(default_factory=list)
    ready: list[LiveRequest] = field(default_factory=list)
    gone: list[LiveRequest] = field(default_factory=list)
    reports: list[PrefetchReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(
            blocks=self.blocks,
            send=self.sent.append,
            job_ids=itertools.count(1),
            num_ranks=self.num_ranks,
            batch_size=self.batch_size,
            timeout_s=self.timeout_s,
            on_ready=self.ready.append,
            on_quiesced=self.gone.append,
            on_end=self.reports.append,
        )

    def start(self, prompt: list[int] | None = None, now: float = 0.0) -> LiveRequest:
        live = live_request(PROMPT if prompt is None else prompt, ready=False)
        self.admission.start(live, now, use_store=True)
        return live

    def answer(self, message: Prefetch, rank: int = 0, hits: bytes | None = None, now: float = 1.0) -> None:
        hits = b"\x01" * len(message.items) if hits is None else hits
        self.admission.on_done(PrefetchDone(rank, message.job_id, message.offset, hits, 0, 0.0, 0, 0), now)

    def answer_all(self) -> None:
        for message in self.sent:  # grows while it is answered
            for rank in range(self.num_ranks):
                self.answer(message, rank)

    def cancel(self, live: LiveRequest) -> None:
        live.apply(RequestEvent.CANCELLED)
        self.admission.cancel(live, 1.0)

    @property
    def published(self) -> int:
        assert self.blocks.host is not None
        return self.blocks.host.pool.counts().published

    @property
    def leased(self) -> int:
        assert self.blocks.host is not None
        self.blocks.host.pool.check_integrity()
        return self.blocks.host.pool.counts().leased


def test_a_prompt_without_a_full_block_asks_nobody() -> None:
    desk = Desk()
    live = desk.start([1, 2, 3])
    assert desk.ready == [live]
    assert desk.sent == []


def test_a_prefix_that_the_host_covers_asks_nobody() -> None:
    desk = Desk()
    desk.start()
    desk.answer_all()
    num_sent = len(desk.sent)
    live = desk.start()
    assert state(live) is RequestState.WAITING
    assert len(desk.sent) == num_sent
    assert len(live.held.pins) == 5


def test_batches_are_issued_in_order_with_two_in_flight() -> None:
    desk = Desk()
    live = desk.start()
    assert [(m.offset, len(m.items)) for m in desk.sent] == [(0, 2), (2, 2)]
    desk.answer(desk.sent[1])
    assert [m.offset for m in desk.sent] == [0, 2, 4]
    desk.answer(desk.sent[0])
    assert state(live) is RequestState.PREFETCHING
    desk.answer(desk.sent[2])
    assert state(live) is RequestState.WAITING
    assert live.held.store_filled == {0, 1, 2, 3, 4}


def test_nothing_is_visible_before_the_last_rank_reported() -> None:
    desk = Desk(num_ranks=3, batch_size=8)
    live = desk.start()
    for rank in (2, 0):
        desk.answer(desk.sent[0], rank)
    assert desk.published == 0
    assert state(live) is RequestState.PREFETCHING
    desk.answer(desk.sent[0], 1)
    assert desk.published == 5
    assert state(live) is RequestState.WAITING


def test_a_block_counts_only_if_every_rank_has_it() -> None:
    desk = Desk(num_ranks=2, batch_size=8)
    live = desk.start()
    desk.answer(desk.sent[0], 0, b"\x01\x01\x00\x01\x01")
    desk.answer(desk.sent[0], 1, b"\x01\x01\x01\x01\x00")
    assert sorted(live.held.pins) == [0, 1]
    assert desk.published == 3  # block 3 is behind a hole, and still worth keeping
    assert desk.reports[0].outcome is PrefetchOutcome.PARTIAL


def test_a_known_miss_stops_further_batches() -> None:
    desk = Desk(num_ranks=2)
    live = desk.start()
    desk.answer(desk.sent[0], 1, b"\x00\x01")
    desk.answer(desk.sent[0], 0)
    assert state(live) is RequestState.PREFETCHING, "the second batch is still being written into"
    desk.answer(desk.sent[1], 0)
    desk.answer(desk.sent[1], 1)
    assert [m.offset for m in desk.sent] == [0, 2]
    assert state(live) is RequestState.WAITING


def test_the_deadline_lets_the_request_go_and_keeps_the_slots_of_what_is_in_flight() -> None:
    desk = Desk(timeout_s=0.5)
    live = desk.start(now=10.0)
    assert desk.admission.next_deadline() == 10.5
    desk.admission.tick(10.4)
    assert state(live) is RequestState.PREFETCHING
    desk.admission.tick(10.5)
    desk.admission.tick(11.0)
    assert desk.ready == [live]
    assert state(live) is RequestState.WAITING
    assert desk.admission.num_pending == 0
    assert desk.admission.next_deadline() is None
    assert (desk.leased, desk.published) == (4, 0), "ranks still write into these slots"
    desk.answer(desk.sent[0])
    desk.answer(desk.sent[1], now=11.5)
    assert len(desk.sent) == 2
    assert live.held.pins == {}
    assert (desk.leased, desk.published) == (0, 4), "what came late is there for others"
    assert desk.reports == [PrefetchReport(PrefetchOutcome.TIMEOUT, 5, 4, 1.5)]


def test_at_the_deadline_a_request_takes_along_what_is_there() -> None:
    desk = Desk(timeout_s=0.5, num_ranks=2)
    live = desk.start()
    for message, rank in ((0, 0), (0, 1), (1, 1)):
        desk.answer(desk.sent[message], rank, now=0.2)
    desk.admission.tick(0.5)
    assert sorted(live.held.pins) == [0, 1]
    assert live.held.store_filled == {0, 1}
    assert desk.published == 2
    desk.answer(desk.sent[1], 0)
    for rank in (0, 1):
        desk.answer(desk.sent[2], rank)
    assert desk.published == 5
    desk.blocks.release(live)
    assert desk.leased == 0


def test_the_deadline_counts_when_every_batch_was_issued_too() -> None:
    desk = Desk(timeout_s=0.5, batch_size=8)
    live = desk.start()
    assert desk.admission.next_deadline() == 0.5
    desk.admission.tick(0.5)
    assert desk.ready == [live]


def test_a_request_that_went_on_and_is_cancelled_does_not_end_with_its_old_prefetch() -> None:
    desk = Desk(timeout_s=0.5)
    live = desk.start()
    desk.admission.tick(0.5)
    live.apply(RequestEvent.SCHEDULED)
    live.apply(RequestEvent.CANCELLED)
    desk.answer_all()
    assert state(live) is RequestState.STOPPING, "its step is still in flight"
    assert desk.gone == []
    assert desk.leased == 0


def test_who_waits_for_a_request_that_went_on_gets_what_it_fetched() -> None:
    desk = Desk(timeout_s=1.0, batch_size=8)
    desk.start(now=0.0)
    second = desk.start(now=0.5)
    desk.admission.tick(1.0)
    assert state(second) is RequestState.PREFETCHING
    desk.answer_all()
    assert len(second.held.pins) == 5


def test_no_timeout_means_for_ever() -> None:
    desk = Desk(timeout_s=None)
    live = desk.start()
    desk.admission.tick(1e9)
    assert state(live) is RequestState.PREFETCHING
    assert desk.admission.next_deadline() is None


def test_a_cancelled_prefetch_waits_for_its_batches_and_publishes_nothing() -> None:
    desk = Desk()
    live = desk.start()
    desk.cancel(live)
    assert desk.leased == 4
    for message in list(desk.sent):
        desk.answer(message)
    assert len(desk.sent) == 2
    assert (desk.leased, desk.published) == (0, 0)
    assert desk.gone == [live]
    assert desk.ready == []
    assert desk.reports[0].outcome is PrefetchOutcome.CANCELLED


def test_an_answer_of_the_wrong_length_fails_its_rank() -> None:
    desk = Desk(num_ranks=2, batch_size=8)
    live = desk.start()
    desk.answer(desk.sent[0], 0, b"\x01")
    desk.answer(desk.sent[0], 1)
    assert state(live) is RequestState.WAITING
    assert desk.published == 0
    assert desk.reports[0].outcome is PrefetchOutcome.ERROR


def test_answers_that_come_twice_or_for_no_job_are_ignored() -> None:
    desk = Desk(num_ranks=2, batch_size=8)
    live = desk.start()
    for _ in range(3):
        desk.answer(desk.sent[0], 0)
    assert state(live) is RequestState.PREFETCHING
    desk.admission.on_done(PrefetchDone(0, 999, 0, b"\x01", 0, 0.0, 0, 0), 1.0)


def test_one_prefetch_never_blocks_another() -> None:
    desk = Desk()
    first = desk.start()
    second = desk.start(list(range(9)))
    desk.answer(desk.sent[2])
    assert desk.ready == [second]
    assert state(first) is RequestState.PREFETCHING


def test_a_hash_is_fetched_once_and_both_requests_get_it() -> None:
    desk = Desk(batch_size=8)
    first = desk.start()
    second = desk.start([*PROMPT, 1, 2, 3])
    assert [len(message.items) for message in desk.sent] == [5, 1]
    desk.answer(desk.sent[1])
    assert state(second) is RequestState.PREFETCHING
    desk.answer(desk.sent[0])
    assert (state(first), state(second)) == (RequestState.WAITING, RequestState.WAITING)
    assert sorted(second.held.pins) == [0, 1, 2, 3, 4, 5]
    assert second.held.store_filled == {0, 1, 2, 3, 4, 5}


def test_a_cancelled_request_goes_on_fetching_for_whoever_waits_for_it() -> None:
    desk = Desk()
    first, second = desk.start(), desk.start()
    desk.cancel(first)
    desk.answer_all()
    assert desk.ready == [second]
    assert desk.gone == [first]
    assert len(second.held.pins) == 5


def test_when_nobody_wants_a_prefetch_any_more_it_stops() -> None:
    desk = Desk()
    first, second = desk.start(), desk.start()
    desk.cancel(first)
    desk.cancel(second)
    desk.answer_all()
    assert len(desk.sent) == 2
    assert desk.gone == [second, first]
    assert desk.leased == 0


def test_a_retry_fetches_what_a_cancelled_prefetch_never_asked_for() -> None:
    desk = Desk(batch_size=1)
    first = desk.start()
    desk.cancel(first)
    second = desk.start()
    assert [message.job_id for message in desk.sent] == [1, 1, 2, 2], "nobody else will fetch these"
    desk.answer_all()
    assert (desk.gone, desk.ready) == ([first], [second])
    assert sorted(second.held.pins) == [0, 1, 2, 3, 4]
    desk.blocks.release(second)
    assert desk.leased == 0


def test_who_waits_for_what_a_stopped_prefetch_gave_up_goes_on_without_it() -> None:
    desk = Desk(batch_size=1, timeout_s=1.0)
    first, second = desk.start(now=0.0), desk.start(now=0.5)
    desk.admission.tick(1.0)
    assert desk.ready == [first]
    assert desk.leased == 2
    third = desk.start(now=1.0)
    desk.answer_all()
    assert desk.ready == [first, second, third]
    assert (sorted(second.held.pins), sorted(third.held.pins)) == ([0, 1], [0, 1, 2, 3, 4])
    for live in desk.ready:
        desk.blocks.release(live)
    assert desk.leased == 0


def test_a_known_miss_gives_up_what_was_not_asked_for_yet() -> None:
    desk = Desk(batch_size=1)
    live = desk.start()
    desk.answer(desk.sent[0], hits=b"\x00")
    assert desk.leased == 2
    desk.answer(desk.sent[1])
    assert (desk.ready, desk.leased, desk.published) == ([live], 0, 1)
    assert desk.reports == [PrefetchReport(PrefetchOutcome.PARTIAL, 5, 1, 1.0)]


def test_a_deadline_ends_waiting_for_another_request() -> None:
    desk = Desk(timeout_s=1.0)
    desk.start(now=0.0)
    second = desk.start(now=0.5)
    desk.admission.tick(1.5)
    assert state(second) is RequestState.WAITING
    assert second.held.pins == {}
    desk.answer_all()
    desk.blocks.release(second)


def test_a_small_host_pool_gets_a_shorter_prefix() -> None:
    desk = Desk(blocks=block_manager(num_host=4), batch_size=8)
    live = desk.start()
    assert len(desk.sent[0].items) == 3
    desk.answer_all()
    assert sorted(live.held.pins) == [0, 1, 2]


def test_long_chains_of_waiting_requests_end_without_deep_recursion() -> None:
    desk = Desk(blocks=block_manager(num_host=400), batch_size=1)
    requests = [desk.start(list(range(4 * count + 1))) for count in range(1, 300)]
    desk.answer_all()
    assert len(desk.ready) == len(requests)


def test_a_fetched_block_that_lost_to_a_resident_one_is_not_kept_twice() -> None:
    desk = Desk(batch_size=8)
    live = desk.start()
    other = live_request(PROMPT)
    match = desk.blocks.match(other, BatchId(1))
    desk.blocks.allocate(other, match, match.prefix, BatchId(1))
    other.num_computed = len(PROMPT)
    entries = desk.blocks.settle(other)
    assert desk.blocks.host is not None
    desk.blocks.host.end_copy(entries, ok=True)
    desk.answer_all()
    assert sorted(live.held.pins.values()) == sorted(entry.item.host_slot for entry in entries)
    desk.blocks.host.pool.release([entry.item.host_slot for entry in entries])
    desk.blocks.release(live)
    assert desk.leased == 0
    assert desk.published == 5
