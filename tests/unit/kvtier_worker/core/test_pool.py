"""The block pool by examples: leases, sharing, publication and eviction. Its invariants are in test_pool_machine."""

from __future__ import annotations

import pytest
from kvtier_worker.core.eviction import LRU
from kvtier_worker.core.ids import BatchId, BlockHash, Tier
from kvtier_worker.core.pool import PADDING_SLOT, BlockPool, PoolCounts, SlotState
from kvtier_worker.errors import IntegrityError, PoolExhausted

BATCH = BatchId(7)


def block(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(16, b"."))


def chain(name: str, length: int) -> list[BlockHash]:
    return [block(f"{name}{index}") for index in range(length)]


def device(usable: int) -> BlockPool:
    return BlockPool(Tier.DEVICE, usable + 1, LRU())


def cache(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """What a request that computes ``hashes`` and finishes leaves behind."""
    shared = pool.match(hashes)
    for slot in shared:
        pool.share(slot)
    slots = shared + pool.lease(len(hashes) - len(shared))
    pool.fill(slots)
    for index, block_hash in enumerate(hashes):
        pool.publish(slots[index], block_hash, hashes[index - 1] if index else None)
    pool.release(slots)
    pool.check_integrity()
    return slots


def test_slot_zero_is_padding_and_never_handed_out() -> None:
    pool = device(3)
    assert pool.usable == 3
    assert sorted(pool.lease(3)) == [1, 2, 3]
    assert pool.state(PADDING_SLOT) is SlotState.FREE


def test_a_pool_without_usable_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 slots"):
        BlockPool(Tier.HOST, 1)


def test_a_lease_that_does_not_fit_changes_nothing() -> None:
    pool = device(4)
    cache(pool, chain("a", 2))
    held = pool.lease(1)
    before = pool.counts()
    with pytest.raises(PoolExhausted, match="device pool: 4 slots wanted, 3 available of 4"):
        pool.lease(4)
    assert pool.counts() == before == PoolCounts(usable=4, free=1, leased=1, cached=2, published=2)
    pool.release(held)


def test_a_lease_evicts_exactly_the_shortfall() -> None:
    pool = device(4)
    cache(pool, chain("a", 3))
    pool.lease(2)
    assert pool.counts().cached == 2
    assert pool.num_evictions == 1


def test_eviction_takes_the_tail_of_the_prefix_used_least_recently() -> None:
    pool = device(6)
    a, b = chain("a", 3), chain("b", 3)
    cache(pool, a)
    cache(pool, b)
    pool.lease(2)
    assert len(pool.match(a)) == 1
    assert len(pool.match(b)) == 3


def test_a_root_stays_recent_when_a_short_request_shares_it() -> None:
    pool = device(6)
    a, b = chain("a", 3), chain("b", 3)
    cache(pool, a)
    cache(pool, b)
    cache(pool, a[:1])
    pool.lease(4)
    assert len(pool.match(a)) == 1
    assert len(pool.match(b)) == 1


def test_a_root_is_evicted_after_all_its_branches() -> None:
    pool = device(5)
    root, left, right = block("root"), block("left"), block("right")
    cache(pool, [root, left])
    cache(pool, [root, right])
    pool.lease(4)
    assert pool.match([root]) != []
    assert pool.lookup(left) is pool.lookup(right) is None


def test_a_root_outlives_a_tail_that_a_job_released_later() -> None:
    """A write-back holds the tail longer than the request; afterwards the root keeps its place in the order."""
    pool = device(3)
    a, b = chain("a", 2), chain("b", 1)
    slots = pool.lease(2)
    pool.fill(slots)
    pool.publish(slots[0], a[0], None)
    pool.publish(slots[1], a[1], a[0])
    pool.share(slots[1])
    pool.release(slots)
    pool.release(slots[1:])
    cache(pool, b)
    pool.lease(1)
    assert pool.probe([*a, *b]) == [slots[0], None, 3]
    pool.lease(1)
    assert pool.probe([*a, *b]) == [None, None, 3]


def test_a_leased_slot_is_never_evicted() -> None:
    pool = device(3)
    hashes = chain("a", 2)
    slots = cache(pool, hashes)
    for slot in slots:
        pool.share(slot)
    with pytest.raises(PoolExhausted):
        pool.lease(2)
    assert pool.match(hashes) == slots


def test_roots_held_back_by_a_leased_tail_can_still_be_leased_deepest_first() -> None:
    # Someone holds block 2 alone, as the owner of private copies of 0 and 1 does.
    pool = device(4)
    hashes = chain("a", 3)
    slots = cache(pool, hashes)
    pool.share(slots[2])
    pool.lease(2)
    assert pool.probe(hashes) == [slots[0], None, slots[2]]
    pool.check_integrity()


def test_a_slot_is_cached_when_its_last_holder_leaves() -> None:
    pool = device(2)
    [slot] = pool.lease(1)
    pool.share(slot)
    pool.fill([slot])
    pool.publish(slot, block("a"), None)
    pool.release([slot])
    assert (pool.state(slot), pool.leases(slot)) == (SlotState.FILLED, 1)
    pool.release([slot])
    assert (pool.state(slot), pool.leases(slot)) == (SlotState.CACHED, 0)


def test_an_unpublished_slot_is_free_when_its_last_holder_leaves() -> None:
    pool = device(2)
    slots = pool.lease(2)
    pool.fill(slots[:1])
    pool.release(slots)
    assert pool.counts().free == 2


def test_the_first_copy_of_a_block_stays_and_the_second_remains_private() -> None:
    pool = device(2)
    first, second = pool.lease(2)
    pool.fill([first, second])
    assert pool.publish(first, block("a"), None) == first
    assert pool.publish(second, block("a"), None) == first
    assert not pool.is_published(second)
    pool.release([first, second])
    assert pool.counts() == PoolCounts(usable=2, free=1, leased=0, cached=1, published=1)


def test_only_filled_slots_are_published() -> None:
    pool = device(1)
    [slot] = pool.lease(1)
    with pytest.raises(IntegrityError, match="leased and cannot be published"):
        pool.publish(slot, block("a"), None)


def test_a_restoring_slot_is_published_with_the_batch_that_fills_it() -> None:
    pool = device(1)
    [slot] = pool.lease(1)
    pool.begin([slot], SlotState.RESTORING)
    with pytest.raises(IntegrityError):
        pool.publish(slot, block("a"), None)
    pool.publish(slot, block("a"), None, pending=BATCH)
    assert pool.match([block("a")]) == [slot]
    assert pool.pending(slot) == BATCH
    pool.check_integrity()
    pool.fill([slot])
    assert pool.pending(slot) is None
    pool.release([slot])
    assert pool.state(slot) is SlotState.CACHED


def test_an_aborted_restore_is_unfindable_and_frees_its_slot() -> None:
    pool = device(1)
    [slot] = pool.lease(1)
    pool.begin([slot], SlotState.RESTORING)
    pool.publish(slot, block("a"), None, pending=BATCH)
    pool.share(slot)
    pool.unpublish(slot)
    assert pool.lookup(block("a")) is None
    assert pool.pending(slot) is None
    pool.release([slot])
    pool.release([slot])
    assert pool.counts().free == 1


def test_a_slot_published_while_restoring_is_not_cached_unfilled() -> None:
    pool = device(1)
    [slot] = pool.lease(1)
    pool.begin([slot], SlotState.RESTORING)
    pool.publish(slot, block("a"), None, pending=BATCH)
    pool.release([slot])
    assert pool.lookup(block("a")) is None
    assert pool.counts().free == 1


def test_unpublishing_a_cached_slot_frees_it() -> None:
    pool = device(2)
    hashes = chain("a", 2)
    slots = cache(pool, hashes)
    pool.unpublish(slots[0])
    pool.unpublish(slots[0])
    assert pool.probe(hashes) == [None, slots[1]]
    assert pool.counts().free == 1
    pool.check_integrity()


def test_a_host_slot_goes_through_its_copy_before_it_is_filled() -> None:
    pool = BlockPool(Tier.HOST, 2, LRU())
    [slot] = pool.lease(1)
    assert pool.state(slot) is SlotState.RESERVED
    with pytest.raises(IntegrityError, match="reserved -> filled is not allowed"):
        pool.fill([slot])
    pool.begin([slot], SlotState.FETCHING)
    pool.fill([slot])
    pool.publish(slot, block("a"), None)
    pool.release([slot])
    assert pool.match([block("a")]) == [slot]


@pytest.mark.parametrize("copy", [SlotState.FETCHING, SlotState.OFFLOADING])
def test_a_missed_copy_into_a_host_slot_frees_it(copy: SlotState) -> None:
    pool = BlockPool(Tier.HOST, 2, LRU())
    slots = pool.lease(1)
    pool.begin(slots, copy)
    pool.release(slots)
    assert pool.counts().free == 1


def test_what_is_not_a_copy_cannot_begin() -> None:
    pool = device(1)
    [slot] = pool.lease(1)
    with pytest.raises(IntegrityError, match="not the name of a copy"):
        pool.begin([slot], SlotState.FILLED)
    with pytest.raises(IntegrityError, match="leased -> fetching is not allowed"):
        pool.begin([slot], SlotState.FETCHING)


def test_misuse_of_leases_is_fatal() -> None:
    pool = device(2)
    [slot] = pool.lease(1)
    pool.release([slot])
    with pytest.raises(IntegrityError, match="released more often than leased"):
        pool.release([slot])
    with pytest.raises(IntegrityError, match="free and cannot be shared"):
        pool.share(slot)
    [cached] = cache(pool, chain("a", 1))
    with pytest.raises(IntegrityError, match="cached and filled by nobody"):
        pool.fill([cached])


def test_drop_frees_all_that_only_the_cache_holds_and_is_no_eviction() -> None:
    pool = device(5)
    hashes = chain("a", 3)
    slots = cache(pool, hashes)
    pool.share(slots[2])
    assert pool.drop_cached() == 2
    assert pool.probe(hashes) == [None, None, slots[2]]
    assert pool.num_evictions == 0
    pool.check_integrity()


def test_every_block_that_stops_being_findable_is_told() -> None:
    gone: list[BlockHash] = []
    pool = BlockPool(Tier.DEVICE, 4, LRU(), on_evict=gone.append)
    a, b = chain("a", 2), chain("b", 1)
    cache(pool, a)
    slots = cache(pool, b)
    pool.lease(1)
    assert gone == [a[1]]
    pool.unpublish(slots[0])
    pool.drop_cached()
    assert gone == [a[1], b[0], a[0]]


def test_matching_has_no_effect_on_the_order() -> None:
    pool = device(2)
    a, b = chain("a", 1), chain("b", 1)
    cache(pool, a)
    cache(pool, b)
    pool.match(a)
    pool.probe(a)
    pool.lease(1)
    assert pool.lookup(a[0]) is None


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._free.pop(), "free list differs from free slots"),
        (lambda pool: pool._index.clear(), "believes to be published and is not"),
        (lambda pool: pool._children.clear(), "children counted differ"),
        (lambda pool: pool.policy.remove(1), "policy knows 1"),
        (lambda pool: setattr(pool._slots[1], "leases", 1), "cached with 1 leases"),
        (lambda pool: setattr(pool._slots[1], "pending", BATCH), "waits for batch 7"),
        (lambda pool: setattr(pool._slots[1], "block_hash", None), "cached and unpublished"),
        (lambda pool: setattr(pool._slots[1], "state", SlotState.RESTORING), "restoring and published"),
    ],
)
def test_the_integrity_check_sees_what_is_broken(break_it: object, message: str) -> None:
    pool = device(4)
    cache(pool, chain("a", 2))
    assert callable(break_it)
    break_it(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()
