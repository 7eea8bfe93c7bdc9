"""Sizes of objects and the ranges that layers are cut into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_worker.core.ids import DType, TensorRole
from kvtier_worker.core.layout import SLOT_ALIGNMENT, TRAILER_BYTES, ObjectLayout, TensorSpec, layer_ranges

KEY = TensorSpec(TensorRole.KEY, DType.FLOAT32, (128, 3, 64))
VALUE = TensorSpec(TensorRole.VALUE, DType.FLOAT32, (128, 3, 64))


def test_sizes_of_a_smollm2_block() -> None:
    layout = ObjectLayout(30, (KEY, VALUE))
    assert KEY.nbytes == 98_304
    assert layout.layer_bytes == 196_608
    assert layout.payload_bytes == 5_898_240
    assert layout.object_bytes == 5_898_240 + TRAILER_BYTES
    assert layout.slot_bytes == 5_898_240 + SLOT_ALIGNMENT


def test_layer_span_is_contiguous_from_first_to_last_layer() -> None:
    layout = ObjectLayout(4, (TensorSpec(TensorRole.KEY, DType.INT8, (3,)),))
    assert [layout.layer_span(layer, layer + 1) for layer in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert layout.layer_span(1, 4) == (3, layout.payload_bytes)


@pytest.mark.parametrize(
    ("num_layers", "num_copies", "expected"),
    [
        (30, 0, ((0, 30),)),
        (30, 1, ((0, 30),)),
        (3, 2, ((0, 1), (1, 2), (2, 3))),
        (4, 2, ((0, 2), (2, 4))),
        (61, 4, ((0, 15), (15, 30), (30, 45), (45, 60), (60, 61))),
        (2, 8, ((0, 1), (1, 2))),
    ],
)
def test_layer_ranges_as_documented(num_layers: int, num_copies: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert layer_ranges(num_layers, num_copies) == expected


@given(num_layers=st.integers(1, 200), num_copies=st.integers(0, 250))
def test_layer_ranges_cover_every_layer_once_and_only_the_last_is_short(num_layers: int, num_copies: int) -> None:
    ranges = layer_ranges(num_layers, num_copies)
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(range(num_layers))
    sizes = [stop - start for start, stop in ranges]
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]


@given(
    num_layers=st.integers(1, 64),
    dims=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DType),
)
def test_slots_hold_an_object_and_start_on_cache_lines(num_layers: int, dims: list[int], dtype: DType) -> None:
    layout = ObjectLayout(num_layers, (TensorSpec(TensorRole.KEY, dtype, tuple(dims)),))
    assert layout.slot_bytes % SLOT_ALIGNMENT == 0
    assert 0 <= layout.slot_bytes - layout.object_bytes < SLOT_ALIGNMENT
