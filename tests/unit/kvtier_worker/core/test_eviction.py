"""Eviction policies against simple models, and what the adaptive one is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.eviction import POLICIES, S3FIFO, EvictionPolicy, make_policy
from kvtier_worker.core.ids import BlockHash, Tier
from kvtier_worker.core.pool import BlockPool, SlotState

NUM_NODES = 12
OPERATIONS = st.lists(st.tuples(st.sampled_from(["release", "lease", "evict"]), st.integers(1, NUM_NODES)), max_size=80)


def name(node: int) -> BlockHash:
    return BlockHash(node.to_bytes(16, "little"))


class LeafFirstModel:
    """Leaf-first LRU over a fixed binary tree, as a list and a set, in quadratic time.

    A node is resident while it is cached or leased, as in the pool. Evict takes the least recently released leaf, or
    without leaves the least recently released node.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.cached: list[int] = []
        self.leased: set[int] = set()

    def is_leaf(self, node: int) -> bool:
        resident = self.leased | set(self.cached)
        return not {2 * node, 2 * node + 1} & resident

    def release(self, node: int) -> None:
        if node not in self.cached:
            self.leased.discard(node)
            self.cached.append(node)
            self.policy.insert(node, name(node))

    def lease(self, node: int) -> None:
        self.leased.add(node)
        if node in self.cached:
            self.cached.remove(node)
            self.policy.remove(node)

    def evict(self) -> None:
        if not self.cached:
            with pytest.raises(IndexError):
                self.policy.evict(self.is_leaf)
            return
        expected = next((node for node in self.cached if self.is_leaf(node)), self.cached[0])
        assert self.policy.evict(self.is_leaf) == expected
        self.cached.remove(expected)
        above = expected // 2
        if above in self.cached and self.is_leaf(above):
            self.policy.expose(above)


@pytest.mark.parametrize("policy_name", sorted(POLICIES))
@given(operations=OPERATIONS)
def test_order_is_leaf_first_least_recently_released(policy_name: str, operations: list[tuple[str, int]]) -> None:
    """For the adaptive policy too, as long as its tables are cold."""
    model = LeafFirstModel(make_policy(policy_name, NUM_NODES * 100))
    for operation, node in operations:
        if operation == "evict":
            model.evict()
        else:
            getattr(model, operation)(node)
        assert len(model.policy) == len(model.cached)
    while model.cached:
        model.evict()


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fifo' is not one of lru, s3fifo"):
        make_policy("fifo", 8)


class Cache:
    """A pool that prompts go through one at a time; a prompt is a list of prefix-chained names."""

    def __init__(self, policy_name: str, capacity: int) -> None:
        self.policy = make_policy(policy_name, capacity)
        self.pool = BlockPool(Tier.HOST, capacity + 1, self.policy)

    def ask(self, prompt: Sequence[int]) -> int:
        """How many blocks of the prompt were hits."""
        hashes = [name(block) for block in prompt]
        run = self.pool.match(hashes)
        self.pool.hit(run)
        for slot in run:
            self.pool.share(slot)
        fresh = self.pool.lease(len(hashes) - len(run))
        self.pool.begin(fresh, SlotState.FETCHING)
        self.pool.fill(fresh)
        slots = run + fresh
        for index in range(len(run), len(slots)):
            self.pool.publish(slots[index], hashes[index], hashes[index - 1] if index else None)
        self.pool.release(slots)
        return len(run)


def hit_rates(prompts: Sequence[Sequence[int]], capacity: int) -> dict[str, float]:
    rates = {}
    for policy_name in POLICIES:
        cache = Cache(policy_name, capacity)
        rates[policy_name] = sum(map(cache.ask, prompts)) / sum(map(len, prompts))
        cache.pool.check_integrity()
    return rates


def fresh_names() -> Iterator[int]:
    return count(1_000_000)


def test_a_scan_does_not_flush_what_is_used_again_and_again() -> None:
    """Twenty conversations come back every 100 prompts; between them, single prompts of 10 new blocks pass through."""
    new = fresh_names()
    prompts = []
    for step in range(3000):
        conversation = (step // 5) % 20 if step % 5 == 0 else None
        if conversation is None:
            prompts.append([next(new) for _ in range(10)])
        else:
            prompts.append([conversation * 10 + block for block in range(10)])
    rates = hit_rates(prompts, capacity=400)
    assert rates["lru"] == 0.0
    assert rates["s3fifo"] > 0.15  # of at most 0.2


def test_where_recency_is_right_it_stays_with_recency() -> None:
    """Each conversation is asked four times in short succession and then never again."""
    new = fresh_names()
    prompts: list[list[int]] = []
    alive: list[list[int]] = []
    for _ in range(400):
        alive.append([next(new) for _ in range(10)])
        prompts += alive[-4:]
    rates = hit_rates(prompts, capacity=300)
    assert rates["s3fifo"] >= 0.99 * rates["lru"] > 0.5


def test_it_follows_when_habits_change() -> None:
    """Main blocks of yesterday, never used again, do not keep today's out."""
    yesterday = [[c * 10 + block for block in range(10)] for c in range(20)] * 100
    today = [[1000 + c * 10 + block for block in range(10)] for c in range(30)] * 40
    cache = Cache("s3fifo", 300)
    for prompt in yesterday:
        cache.ask(prompt)
    hits = [cache.ask(prompt) for prompt in today]
    assert sum(hits[-300:]) == 3000


def test_what_is_remembered_is_bounded() -> None:
    policy = S3FIFO(100)
    limit = policy._max_records
    cache = Cache("lru", 100)
    cache.policy = cache.pool.policy = policy
    new = fresh_names()
    for _ in range(limit // 10 + 50):
        cache.ask([next(new) for _ in range(10)])
    for _ in range(limit + 50):
        policy.hit(name(next(new)))
    assert len(policy._records) == limit
    assert limit <= max(8 * 100, S3FIFO.SPANS * S3FIFO.MIN_SPAN)
    assert len(policy) <= 100


def test_a_block_that_comes_back_after_its_eviction_goes_to_main() -> None:
    policy = S3FIFO(4)
    policy.insert(1, name(1))
    policy.insert(2, name(2))
    assert policy.evict(lambda slot: True) == 1
    policy.insert(3, name(1))
    assert [in_main for _, in_main, _ in policy._cached.values()] == [False, True]


def test_a_block_shared_before_its_first_release_goes_to_main() -> None:
    policy = S3FIFO(4)
    policy.hit(name(1))
    policy.insert(1, name(1))
    assert [in_main for _, in_main, _ in policy._cached.values()] == [True]


def test_a_lease_without_a_hit_is_no_second_use() -> None:
    policy = S3FIFO(4)
    policy.insert(1, name(1))
    policy.remove(1)
    policy.insert(1, name(1))
    assert [in_main for _, in_main, _ in policy._cached.values()] == [False]
