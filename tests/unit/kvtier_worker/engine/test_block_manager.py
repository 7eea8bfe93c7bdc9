from __future__ import annotations

from collections.abc import Sequence

import pytest
from kvtier_worker.core.ids import BatchId, BlockHash, JobId, Tier
from kvtier_worker.core.lifecycle import RequestEvent
from kvtier_worker.core.plans import RestoreItem
from kvtier_worker.core.pool import SlotState
from kvtier_worker.engine.block_manager import TieredBlockManager
from kvtier_worker.engine.host_tier import WritebackEntry
from kvtier_worker.engine.requests import COMPUTED, SHARED, LiveRequest, Origin
from kvtier_worker.testing.live import block_manager, live_request

PROMPT = list(range(100, 122))  # five full blocks of 4 and two tokens


def start(blocks: TieredBlockManager, live: LiveRequest, batch: int = 1) -> tuple[RestoreItem, ...] | None:
    match = blocks.match(live, BatchId(batch))
    return blocks.allocate(live, match, match.prefix, BatchId(batch))


def compute(blocks: TieredBlockManager, live: LiveRequest, end: int | None = None) -> list[WritebackEntry]:
    end = len(live.tokens) if end is None else end
    blocks.reserve_writeback(live, end)
    live.num_computed = end
    return blocks.settle(live)


def finish_copies(blocks: TieredBlockManager, entries: Sequence[WritebackEntry], *, ok: bool = True) -> None:
    assert blocks.host is not None
    blocks.host.end_copy(entries, ok=ok)
    blocks.device.release([entry.item.device_block for entry in entries])
    blocks.host.pool.release([entry.item.host_slot for entry in entries])


def cache_on_host(blocks: TieredBlockManager, prompt: Sequence[int]) -> None:
    live = live_request(prompt, block_size=blocks.block_size)
    assert start(blocks, live) == ()
    entries = compute(blocks, live)
    blocks.retire(live)
    finish_copies(blocks, entries)
    blocks.device.drop_cached()


def hashes(live: LiveRequest) -> Sequence[BlockHash]:
    return live.chain.extend(live.tokens, len(live.tokens) // 4)


def everything_is_free_or_cached(blocks: TieredBlockManager) -> bool:
    blocks.device.check_integrity()
    assert blocks.host is not None
    blocks.host.pool.check_integrity()
    return blocks.device.counts().leased == 0 and blocks.host.pool.counts().leased == 0


def test_a_pool_can_use_every_slot_but_the_padding_one() -> None:
    blocks = block_manager(num_device=128)
    assert blocks.device.usable == 127


def test_matching_has_no_effect() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    before = blocks.device.counts()
    live = live_request(PROMPT)
    assert blocks.match(live, BatchId(1)).prefix.num_restores == 5
    assert live.held.empty
    assert blocks.device.counts() == before


def test_a_restored_prefix_is_planned_from_its_host_slots() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request(PROMPT)
    items = start(blocks, live)
    assert items is not None
    assert [item.device_block for item in items] == live.held.table[:5]
    assert [p.host_slot for p in live.held.provenance] == [*(item.host_slot for item in items), None]
    assert live.num_computed == 20


@pytest.mark.parametrize(("budget", "tokens"), [(8, 1024), (4, 512), (0, 0)])
def test_the_restore_budget_is_linear_in_blocks(budget: int, tokens: int) -> None:
    blocks = block_manager(block_size=128)
    prompt = list(range(1025))
    cache_on_host(blocks, prompt)
    live = live_request(prompt, block_size=128)
    match = blocks.match(live, BatchId(1))
    items = blocks.allocate(live, match, match.prefix.trim(budget), BatchId(1))
    assert items is not None
    assert (len(items), live.num_computed) == (budget, tokens)


def test_at_least_one_prompt_token_is_computed_when_everything_is_cached() -> None:
    blocks = block_manager()
    prompt = PROMPT[:20]
    cache_on_host(blocks, prompt)
    live = live_request(prompt)
    items = start(blocks, live)
    assert items is not None
    assert (len(items), live.num_computed) == (4, 16)


def test_a_failed_device_allocation_changes_nothing() -> None:
    blocks = block_manager(num_device=7)
    cache_on_host(blocks, PROMPT)
    other = live_request(range(9))
    assert start(blocks, other) == ()
    live = live_request(PROMPT)
    blocks.pin_resident(live)
    assert blocks.host is not None
    before = blocks.device.counts(), blocks.host.pool.counts(), dict(live.held.pins)
    assert start(blocks, live) is None
    assert (blocks.device.counts(), blocks.host.pool.counts(), live.held.pins) == before
    assert live.held.table == []


def test_headroom_is_left_to_others() -> None:
    blocks = block_manager(num_device=8)
    live = live_request(PROMPT)
    match = blocks.match(live, BatchId(1))
    assert blocks.allocate(live, match, match.prefix, BatchId(1), headroom=2) is None
    assert blocks.allocate(live, match, match.prefix, BatchId(1), headroom=1) == ()


def test_a_full_host_pool_does_not_keep_a_request_from_the_device() -> None:
    blocks = block_manager(num_host=2)
    live = live_request(PROMPT)
    assert start(blocks, live) == ()
    entries = compute(blocks, live)
    assert len(entries) == 1


def test_completed_blocks_are_written_back_as_they_grow_and_only_once() -> None:
    blocks = block_manager()
    live = live_request(PROMPT)
    assert start(blocks, live) == ()
    assert len(compute(blocks, live, 6)) == 1
    assert len(compute(blocks, live, 14)) == 2
    assert len(compute(blocks, live)) == 2
    assert blocks.retire(live) == []


def test_blocks_that_are_on_the_host_are_not_copied_again() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request([*PROMPT, 1, 2])
    assert start(blocks, live) is not None
    entries = compute(blocks, live)
    assert [entry.item.block_hash for entry in entries] == [hashes(live)[5]]
    assert entries[0].parent == hashes(live)[4]


def test_a_failed_copy_publishes_nothing_and_frees_its_slots() -> None:
    blocks = block_manager()
    live = live_request(PROMPT)
    assert start(blocks, live) == ()
    entries = compute(blocks, live)
    blocks.retire(live)
    finish_copies(blocks, entries, ok=False)
    assert blocks.host is not None
    assert blocks.host.pool.counts().free == blocks.host.pool.usable
    assert not blocks.host.outgoing
    assert everything_is_free_or_cached(blocks)


def test_a_restored_block_can_be_shared_by_the_same_batch_only() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    first, second, third = live_request(PROMPT), live_request(PROMPT), live_request(PROMPT)
    assert len(start(blocks, first, batch=7) or ()) == 5
    assert start(blocks, second, batch=7) == ()
    assert second.held.table[:5] == first.held.table[:5]
    assert second.held.provenance[:5] == [SHARED] * 5
    assert blocks.match(third, BatchId(8)).device == [None] * 5


def test_two_requests_that_mounted_the_same_host_prefix_both_restore_right() -> None:
    """The count of holders of a host slot says nothing about a device block's content."""
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    first, second = live_request(PROMPT), live_request(PROMPT)
    blocks.pin_resident(first)
    blocks.pin_resident(second)
    assert len(start(blocks, first, batch=1) or ()) == 5
    compute(blocks, first)
    blocks.retire(first)
    blocks.device.drop_cached()
    assert len(start(blocks, second, batch=2) or ()) == 5
    assert [p.origin for p in second.held.provenance[:5]] == [Origin.RESTORED] * 5


def test_an_aborted_step_unpublishes_what_it_was_to_restore() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    owner, sharer = live_request(PROMPT), live_request(PROMPT)
    start(blocks, owner, batch=3)
    start(blocks, sharer, batch=3)
    blocks.abort_pending(owner)
    assert blocks.device.match(hashes(owner)) == []
    blocks.release(owner)
    assert blocks.device.state(sharer.held.table[0]) is SlotState.RESTORING
    blocks.release(sharer)
    assert blocks.device.counts().free == blocks.device.usable
    assert everything_is_free_or_cached(blocks)


def test_host_slots_stay_leased_until_the_step_that_copies_from_them_is_over() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request(PROMPT)
    items = start(blocks, live) or ()
    assert blocks.host is not None
    assert [blocks.host.pool.leases(item.host_slot) for item in items] == [1] * 5
    compute(blocks, live)
    assert [blocks.host.pool.leases(item.host_slot) for item in items] == [0] * 5


def test_device_and_host_complement_each_other_block_by_block() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request(PROMPT)
    start(blocks, live)
    compute(blocks, live)
    kept = live.held.table[2]
    blocks.retire(live)
    for index, block in enumerate(blocks.device.match(hashes(live))):
        if index != 2:
            blocks.device.unpublish(block)
    again = live_request(PROMPT)
    items = start(blocks, again, batch=2) or ()
    assert [item.device_block for item in items] == [b for i, b in enumerate(again.held.table[:5]) if i != 2]
    assert again.held.table[2] == kept
    assert again.held.provenance[2] is SHARED


def test_a_duplicate_gives_way_to_the_resident_block() -> None:
    blocks = block_manager()
    first, second = live_request(PROMPT), live_request(PROMPT)
    start(blocks, first)
    start(blocks, second)
    compute(blocks, first)
    free = blocks.device.counts().free
    assert compute(blocks, second) == []
    assert second.held.table[:5] == first.held.table[:5]
    assert blocks.device.counts().free == free + 5


def test_cached_tokens_are_told_apart_by_where_they_came_from() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request(PROMPT)
    blocks.pin_fetched(live, [3, 4])
    start(blocks, live)
    assert blocks.cached_tokens(live) == {Tier.DEVICE: 0, Tier.HOST: 12, Tier.STORE: 8}
    compute(blocks, live)
    other = live_request(PROMPT)
    start(blocks, other, batch=2)
    assert blocks.cached_tokens(other) == {Tier.DEVICE: 20, Tier.HOST: 0, Tier.STORE: 0}


def test_prefetch_gives_slots_to_the_lowest_holes_first() -> None:
    blocks = block_manager(num_host=4)
    live = live_request(PROMPT, ready=False)
    need = blocks.plan_prefetch(live, JobId(1))
    assert need is not None
    assert need.indices == (0, 1, 2)


def test_holes_may_be_anywhere_and_hits_behind_a_hole_are_published() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    assert blocks.host is not None
    live = live_request(PROMPT, ready=False)
    for index in (0, 3):
        slot = blocks.host.pool.lookup(hashes(live)[index])
        assert slot is not None
        blocks.host.pool.unpublish(slot)
    need = blocks.plan_prefetch(live, JobId(1))
    assert need is not None
    assert need.indices == (0, 3)
    blocks.host.publish_fetched(need, [False, True])
    blocks.host.release_fetched(need)
    assert [slot is not None for slot in blocks.host.pool.probe(hashes(live))] == [False, True, True, True, True]
    assert blocks.mount(live) == 0
    assert everything_is_free_or_cached(blocks)


def test_nothing_is_fetched_that_the_device_has() -> None:
    blocks = block_manager()
    first = live_request(PROMPT)
    start(blocks, first)
    entries = compute(blocks, first)
    blocks.retire(first)
    finish_copies(blocks, entries, ok=False)
    need = blocks.plan_prefetch(live_request([*PROMPT, 1, 2, 3], ready=False), JobId(1))
    assert need is not None
    assert need.indices == (5,)


def test_growth_fails_without_effect_when_the_device_is_full() -> None:
    blocks = block_manager(num_device=7)
    live = live_request(PROMPT)
    start(blocks, live)
    table = list(live.held.table)
    assert not blocks.grow(live)
    assert live.held.table == table


def test_release_gives_back_everything_at_any_point() -> None:
    blocks = block_manager()
    cache_on_host(blocks, PROMPT)
    live = live_request([*PROMPT, 1, 2, 3])
    blocks.pin_resident(live)
    start(blocks, live)
    blocks.reserve_writeback(live, 25)
    blocks.abort_pending(live)
    blocks.release(live)
    assert live.held.empty
    assert everything_is_free_or_cached(blocks)


def test_without_a_prefix_cache_nothing_is_found_or_published() -> None:
    blocks = block_manager()
    blocks.prefix_cache = False
    live = live_request(PROMPT)
    assert start(blocks, live) == ()
    assert compute(blocks, live) == []
    assert live.held.provenance == [COMPUTED] * 6
    assert blocks.retire(live) == []
    live.apply(RequestEvent.CANCELLED)
    assert blocks.device.counts().published == 0
