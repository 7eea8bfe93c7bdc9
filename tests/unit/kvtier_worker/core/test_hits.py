"""The rank x block matrix of a prefetch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.hits import HitMatrix
from kvtier_worker.core.ids import Rank
from kvtier_worker.errors import IntegrityError, ProtocolError

R0, R1, R2 = Rank(0), Rank(1), Rank(2)


def test_a_block_is_a_hit_only_if_every_rank_has_it() -> None:
    matrix = HitMatrix(2, 4)
    assert matrix.record(R0, 0, b"\1\1\0\1")
    assert matrix.record(R1, 0, b"\1\0")
    assert matrix.record(R1, 2, b"\1\1")
    matrix.mark_rank_done(R0)
    matrix.mark_rank_done(R1)
    assert matrix.merged() == (True, False, False, True)
    assert matrix.usable_prefix() == 1


def test_blocks_that_a_rank_did_not_report_are_misses() -> None:
    matrix = HitMatrix(2, 3)
    matrix.record(R0, 0, b"\1\1\1")
    matrix.record(R1, 0, b"\1\1")
    matrix.mark_rank_done(R0)
    matrix.mark_rank_done(R1)
    assert matrix.merged() == (True, True, False)


def test_nothing_is_merged_before_the_last_rank_is_done() -> None:
    matrix = HitMatrix(3, 1)
    for rank in (R0, R2):
        matrix.record(rank, 0, b"\1")
        matrix.mark_rank_done(rank)
    assert not matrix.complete
    with pytest.raises(IntegrityError, match=r"ranks \[1\] are still at work"):
        matrix.merged()
    with pytest.raises(IntegrityError):
        matrix.usable_prefix()


def test_a_failed_rank_has_no_hits_even_those_it_reported() -> None:
    matrix = HitMatrix(2, 2)
    matrix.record(R0, 0, b"\1\1")
    matrix.record(R1, 0, b"\1\1")
    matrix.mark_rank_done(R0)
    matrix.mark_rank_failed(R1)
    matrix.mark_rank_failed(R1)
    assert matrix.complete
    assert matrix.merged() == (False, False)


def test_a_rank_may_fail_after_it_was_done_but_not_recover() -> None:
    matrix = HitMatrix(1, 1)
    matrix.record(R0, 0, b"\1")
    matrix.mark_rank_done(R0)
    matrix.mark_rank_failed(R0)
    matrix.mark_rank_done(R0)
    assert matrix.merged() == (False,)


def test_a_report_after_the_end_of_a_rank_is_ignored() -> None:
    matrix = HitMatrix(1, 2)
    matrix.mark_rank_failed(R0)
    assert not matrix.record(R0, 0, b"\1\1")
    assert matrix.merged() == (False, False)


@pytest.mark.parametrize(
    ("rank", "offset", "hits", "message"),
    [
        (R2, 0, b"\1", "rank 2 of 2"),
        (Rank(-1), 0, b"\1", "rank -1 of 2"),
        (R0, -1, b"\1", r"blocks \[-1, 0\) of a prefetch of 4"),
        (R0, 3, b"\1\1", r"blocks \[3, 5\) of a prefetch of 4"),
        (R0, 0, b"", r"blocks \[0, 0\) of a prefetch of 4"),
        (R0, 0, b"\1\2", "something else than hit and miss"),
        (R0, 1, b"\1", "twice"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused_and_changes_nothing(
    rank: Rank, offset: int, hits: bytes, message: str
) -> None:
    matrix = HitMatrix(2, 4)
    matrix.record(R0, 1, b"\0\1")
    with pytest.raises(ProtocolError, match=message):
        matrix.record(rank, offset, hits)
    matrix.record(R1, 0, b"\1\1\1\1")
    matrix.mark_rank_done(R0)
    matrix.mark_rank_done(R1)
    assert matrix.merged() == (False, False, True, False)


@pytest.mark.parametrize(("ranks", "blocks"), [(0, 1), (1, 0)])
def test_an_empty_matrix_is_a_mistake(ranks: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="needs ranks and blocks"):
        HitMatrix(ranks, blocks)


@given(st.data())
def test_merged_is_the_and_of_what_the_ranks_reported_in_any_order(data: st.DataObject) -> None:
    ranks, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    size = data.draw(st.integers(1, 5))
    rows = [data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)) for _ in range(ranks)]
    failed = data.draw(st.sets(st.integers(0, ranks - 1)))
    matrix = HitMatrix(ranks, blocks)
    reports = [(rank, offset) for rank in range(ranks) for offset in range(0, blocks, size)]
    for rank, offset in data.draw(st.permutations(reports)):
        assert matrix.record(Rank(rank), offset, bytes(rows[rank][offset : offset + size]))
    for rank in range(ranks):
        (matrix.mark_rank_failed if rank in failed else matrix.mark_rank_done)(Rank(rank))
    expected = tuple(not failed and all(row[block] for row in rows) for block in range(blocks))
    assert matrix.merged() == expected
    assert matrix.usable_prefix() == (expected.index(False) if False in expected else blocks)
