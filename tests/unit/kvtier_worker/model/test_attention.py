from __future__ import annotations

import random

import pytest
import torch
from kvtier_worker.model.attention import AttentionFactory, PlainAttention
from kvtier_worker.model.cpu_attention import CpuAttention
from kvtier_worker.model.step import SequencePlan

BLOCK = 8
NUM_BLOCKS = 40


class Scene:
    """Random sequences in a paged cache, and what attention to them is by its definition."""

    def __init__(self, seed: int, shape: list[tuple[int, int]], *, dense: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, dim = 6, 2, 16
        self.cache = torch.full((2, NUM_BLOCKS, self.kv_heads, BLOCK, dim), 7.0, dtype=dtype)
        free = list(range(1, NUM_BLOCKS))
        if not dense:
            random.Random(seed).shuffle(free)
        rows = sum(count for count, _ in shape)
        self.queries = torch.randn(rows, self.heads, dim, generator=generator).to(dtype)
        self.keys = torch.randn(rows, self.kv_heads, dim, generator=generator).to(dtype)
        self.values = torch.randn(rows, self.kv_heads, dim, generator=generator).to(dtype)
        self.sequences: list[SequencePlan] = []
        self.expected = torch.empty(rows, self.heads * dim)
        row = 0
        for count, cached in shape:
            need = -(-(cached + count) // BLOCK)
            table, free = free[:need], free[need:]
            old = torch.randn(2, cached, self.kv_heads, dim, generator=generator).to(dtype)
            new = torch.stack([self.keys[row : row + count], self.values[row : row + count]])
            whole = torch.cat([old, new], dim=1)
            for position in range(cached + count):
                self.cache[:, table[position // BLOCK], :, position % BLOCK] = whole[:, position]
            context = cached + 1 if count == 1 else cached
            self.sequences.append(SequencePlan(row, count, context, tuple(table)))
            self.expected[row : row + count] = self._definition(whole.float(), self.queries[row : row + count], cached)
            row += count

    def _definition(self, whole: torch.Tensor, queries: torch.Tensor, cached: int) -> torch.Tensor:
        result = torch.empty(queries.shape)
        for i in range(queries.shape[0]):
            for head in range(self.heads):
                keys, values = whole[:, : cached + i + 1, head // (self.heads // self.kv_heads)]
                scores = (keys @ queries[i, head].float()) / queries.shape[-1] ** 0.5
                result[i, head] = scores.softmax(0) @ values
        return result.flatten(1)


SHAPES = {
    "one prompt": [(19, 0)],
    "a chunk behind a prefix": [(11, 24)],
    "a chunk behind a ragged prefix": [(11, 21)],
    "one decode": [(1, 30)],
    "first token alone": [(1, 0)],
    "decodes of many lengths": [(1, 3), (1, 40), (1, 7), (1, 8), (1, 15)],
    "everything mixed": [(1, 5), (9, 0), (1, 40), (3, 17), (1, 0)],
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "scattered"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("factory", [CpuAttention, PlainAttention])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention_is_what_its_definition_says(
    factory: AttentionFactory,
    shape: list[tuple[int, int]],
    *,
    dense: bool,
    seed: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    scene = Scene(seed, shape, dense=dense, dtype=dtype)
    attention = factory(scene.sequences, scene.cache)
    result = attention(scene.queries, scene.keys, scene.values, scene.cache)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), scene.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("factory", [CpuAttention, PlainAttention])
def test_a_narrower_cache_is_read_in_the_dtype_of_the_queries(factory: AttentionFactory) -> None:
    scene = Scene(5, SHAPES["everything mixed"], dense=False, dtype=torch.float32)
    attention = factory(scene.sequences, scene.cache.bfloat16())
    result = attention(scene.queries, scene.keys, scene.values, scene.cache.bfloat16())
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, scene.expected, atol=3e-2, rtol=3e-2)


def test_sequences_may_share_blocks() -> None:
    scene = Scene(11, [(1, 30), (1, 12)], dense=True, dtype=torch.float32)
    first = scene.sequences[0]
    shared = SequencePlan(1, 1, first.num_context, first.block_table)
    queries = scene.queries[:1].repeat(2, 1, 1)
    result = CpuAttention([first, shared], scene.cache)(queries, scene.keys, scene.values, scene.cache)
    torch.testing.assert_close(result[0], result[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(result[0], scene.expected[0], atol=2e-6, rtol=2e-6)


def test_scores_too_large_for_exp_do_not_overflow() -> None:
    scene = Scene(13, [(1, 20), (1, 3)], dense=True, dtype=torch.float32)
    attention = CpuAttention(scene.sequences, scene.cache)
    result = attention(scene.queries * 1e4, scene.keys, scene.values, scene.cache)
    assert result.isfinite().all()
