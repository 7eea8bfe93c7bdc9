"""Runs over holes, restore points, and the merge of the device's and the host's answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.ids import Tier
from kvtier_worker.core.prefix import (
    PrefixMatch,
    full_blocks,
    holes,
    match_tiers,
    restorable_blocks,
    run_length,
    usable_run,
)

SLOTS = st.lists(st.none() | st.integers(1, 99), max_size=12)


def test_run_ends_at_the_first_hole() -> None:
    assert run_length([]) == 0
    assert run_length([True, True, False, True]) == 2


def test_holes_may_be_anywhere_and_come_in_token_order() -> None:
    assert holes([None, 5, None, 7, None]) == [0, 2, 4]
    assert holes([1, 2]) == []


def test_tiers_fill_each_others_holes() -> None:
    assert usable_run([1, None, 3], [None, 8, None, 9]) == 4
    assert usable_run([1, None], [2, None, 3]) == 1
    assert usable_run([], [4]) == 1
    assert usable_run() == 0


@pytest.mark.parametrize(
    ("reach", "prompt", "expected"),
    [
        (8, 1025, 8),  # the 1025th token is computed
        (8, 1024, 7),  # all is cached: the last block is computed
        (9, 1025, 8),
        (3, 1025, 3),
        (5, 1, 0),
        (0, 128, 0),
    ],
)
def test_at_least_one_prompt_token_is_computed(reach: int, prompt: int, expected: int) -> None:
    assert restorable_blocks(reach, prompt, 128) == expected


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        restorable_blocks(1, 0, 16)


def test_device_is_preferred_and_host_fills_in() -> None:
    match = match_tiers([1, None, 3], [7, 8, None, 9], prompt_tokens=1000, block_size=128)
    assert match.tiers == (Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST)
    assert match.num_tokens == 512
    assert match.num_restores == 2


def test_restore_budget_is_linear_in_blocks() -> None:
    match = match_tiers([], list(range(1, 9)), prompt_tokens=1025, block_size=128)
    assert match.num_restores == 8
    assert match.trim(4).num_tokens == 512
    assert match.trim(4).num_restores == 4


def test_a_budget_of_nothing_keeps_what_the_device_has() -> None:
    match = match_tiers([1, 2], [7, 8, 9], prompt_tokens=1000, block_size=128)
    assert match.trim(0).tiers == (Tier.DEVICE, Tier.DEVICE)


@given(device=SLOTS, host=SLOTS, prompt=st.integers(1, 200), block_size=st.integers(1, 16), budget=st.integers(0, 12))
def test_a_match_is_covered_by_a_tier_and_leaves_a_token_to_compute(
    device: list[int | None], host: list[int | None], prompt: int, block_size: int, budget: int
) -> None:
    match = match_tiers(device, host, prompt_tokens=prompt, block_size=block_size)
    assert match.num_tokens < prompt
    for index, tier in enumerate(match.tiers):
        slots = device if tier is Tier.DEVICE else host
        assert slots[index] is not None
        if tier is Tier.HOST:
            assert index >= len(device) or device[index] is None
    length = len(match.tiers)
    longer_is_covered = any(length < len(slots) and slots[length] is not None for slots in (device, host))
    assert not longer_is_covered or (length + 1) * block_size >= prompt
    trimmed = match.trim(budget)
    assert trimmed.num_restores <= budget
    assert trimmed.tiers == match.tiers[: len(trimmed.tiers)]
    assert trimmed == match or match.tiers[len(trimmed.tiers)] is Tier.HOST


def test_a_partial_tail_is_no_block() -> None:
    assert full_blocks(255, 128) == 1
    assert full_blocks(256, 128) == 2
    assert PrefixMatch((), 128).num_tokens == 0
