from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.engine.messages import SequenceStep
from kvtier_worker.errors import ProtocolError
from kvtier_worker.model.lone_rows import chain_pairs
from kvtier_worker.model.step import SequencePlan, StepPlan, plan_step

BLOCK = 4
NUM_BLOCKS = 40


def plan(*steps: SequenceStep) -> StepPlan:
    return plan_step(steps, block_size=BLOCK, num_blocks=NUM_BLOCKS, vocab_size=100, num_positions=64)


def step(num_tokens: int, start: int, table: list[int], sample: bool = True) -> SequenceStep:
    return SequenceStep("r", list(range(num_tokens)), start, table, sample)


@st.composite
def sequences(draw: st.DrawFn) -> list[SequenceStep]:
    blocks = draw(st.permutations(range(1, NUM_BLOCKS)))
    found, used = [], 0
    for _ in range(draw(st.integers(1, 4))):
        start, count = draw(st.integers(0, 20)), draw(st.integers(1, 14))
        need = -(-(start + count) // BLOCK)
        if used + need > len(blocks):
            break
        table = sorted(blocks[used : used + need]) if draw(st.booleans()) else blocks[used : used + need]
        used += need
        found.append(step(count, start, list(table), draw(st.booleans())))
    return found


@given(sequences())
def test_every_row_is_written_once_to_the_place_its_block_table_says(steps: list[SequenceStep]) -> None:
    planned = plan(*steps)
    written: dict[int, tuple[int, int]] = {}
    for whole in planned.block_writes:
        for i in range(whole.num_blocks * BLOCK):
            assert whole.first_row + i not in written
            written[whole.first_row + i] = (whole.first_block + i // BLOCK, i % BLOCK)
    for single in planned.row_writes:
        assert single.row not in written
        written[single.row] = (single.block, single.offset)
    expected = [
        (one.block_table[position // BLOCK], position % BLOCK)
        for one in steps
        for position in range(one.start, one.start + len(one.token_ids))
    ]
    assert written == dict(enumerate(expected))


@given(sequences())
def test_a_lone_row_reads_itself_from_the_cache_and_several_do_not(steps: list[SequenceStep]) -> None:
    planned = plan(*steps)
    for one, sequence in zip(steps, planned.sequences, strict=True):
        own = 1 if len(one.token_ids) == 1 else 0
        assert sequence.num_context == one.start + own
    sampling = [one for one in steps if one.sample]
    assert [reader.num_context for reader in planned.readers] == [one.start + len(one.token_ids) for one in sampling]
    assert [reader.first_row for reader in planned.readers] == list(range(len(sampling)))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True), st.integers(1, 4)), max_size=5
    )
)
def test_chains_hold_every_block_of_every_sequence_once_and_are_neighbours(tables: list[tuple[list[int], int]]) -> None:
    lone = [
        SequencePlan(row, 1, (len(table) - 1) * BLOCK + rest, tuple(table)) for row, (table, rest) in enumerate(tables)
    ]
    chains = chain_pairs(lone, BLOCK)
    pairs = sorted((pair.sequence, pair.block, pair.num_tokens) for chain in chains for pair in chain)
    assert pairs == sorted(
        (index, block, rest if block == table[-1] else BLOCK)
        for index, (table, rest) in enumerate(tables)
        for block in table
    )
    for chain in chains:
        assert [pair.block for pair in chain] == list(range(chain[0].block, chain[0].block + len(chain)))


def test_sequences_that_lie_side_by_side_are_one_chain() -> None:
    lone = [SequencePlan(0, 1, 12, (1, 2, 3)), SequencePlan(1, 1, 5, (4, 5)), SequencePlan(2, 1, 4, (6,))]
    assert len(chain_pairs(lone, BLOCK)) == 1


def test_a_shared_prefix_costs_one_chain_per_sequence() -> None:
    lone = [SequencePlan(0, 1, 12, (1, 2, 3)), SequencePlan(1, 1, 12, (1, 2, 4))]
    assert [[pair.block for pair in chain] for chain in chain_pairs(lone, BLOCK)] in (
        [[1, 2, 3, 4], [1, 2]],
        [[1, 2, 3], [1, 2], [4]],
    )


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (step(0, 0, [1]), "0 tokens"),
        (step(1, -1, [1]), "-1"),
        (step(5, 0, [1]), "do not fit"),
        (step(4, 64, [1] * 17), "beyond the model's 64"),
        (step(1, 0, [0]), "block table"),
        (step(1, 0, [NUM_BLOCKS]), "block table"),
        (SequenceStep("r", [100], 0, [1], sample=True), "vocabulary of 100"),
    ],
)
def test_a_step_that_cache_or_model_cannot_hold_is_refused(bad: SequenceStep, part: str) -> None:
    with pytest.raises(ProtocolError, match=part):
        plan(bad)
