"""Attention of single rows (decoding), many sequences at once, reading the cache where it is.

A pair is one block of one sequence. Pairs are lined up so that those whose blocks are neighbours in memory form a
chain; a chain is a plain slice of the cache and costs one batched product for keys and one for values, however many
sequences it spans. Softmax is then taken over the pairs of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier_worker.model.step import SequencePlan


@dataclass(frozen=True, slots=True)
class Pair:
    """One block of one sequence: ``sequence`` counts single-row sequences, ``num_tokens`` are to be attended to."""

    block: int
    sequence: int
    num_tokens: int


def chain_pairs(sequences: Sequence[SequencePlan], block_size: int) -> list[list[Pair]]:
    """Every pair once, in chains of ascending neighbours; few and long ones when blocks lie together."""
    runs: list[list[Pair]] = []
    for index, sequence in enumerate(sequences):
        num_blocks = -(-sequence.num_context // block_size)
        pairs = [
            Pair(block, index, min(block_size, sequence.num_context - place * block_size))
            for place, block in enumerate(sequence.block_table[:num_blocks])
        ]
        pairs.sort(key=lambda pair: pair.block)
        start = 0
        for stop in range(1, len(pairs) + 1):
            if stop == len(pairs) or pairs[stop].block != pairs[stop - 1].block + 1:
                runs.append(pairs[start:stop])
                start = stop
    runs.sort(key=lambda run: run[0].block)
    chains: list[list[Pair]] = []
    ends: dict[int, list[Pair]] = {}
    for run in runs:
        chain = ends.pop(run[0].block, None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.extend(run)
        ends[run[-1].block + 1] = chain
    return chains


@dataclass(frozen=True, slots=True)
class ChainBuffers:
    """One chain's part of the step's buffers, and where its blocks start in a layer's keys or values."""

    queries: torch.Tensor
    mask: torch.Tensor
    scores: torch.Tensor
    outputs: torch.Tensor
    first_element: int


class PairBuffers:
    """Memory for the products of one step, made once and used for every layer: allocation and slicing cost as well.

    Attributes:
        paired: queries of every pair, ``[pairs, heads, head_dim]``.
        scores: ``[pairs, heads, block_size]``.
        outputs: ``[pairs, heads, head_dim]``.
        chains: parts of them.
    """

    def __init__(
        self, queries: torch.Tensor, cache: torch.Tensor, mask: torch.Tensor, slices: Sequence[tuple[slice, int]]
    ) -> None:
        _, num_heads, head_dim = queries.shape
        _, _, num_kv_heads, block_size, _ = cache.shape
        num_pairs, group = mask.shape[0], num_heads // num_kv_heads
        self.paired = queries.new_empty(num_pairs, num_heads, head_dim)
        self.scores = queries.new_empty(num_pairs, num_heads, block_size)
        self.outputs = torch.empty_like(self.paired)
        masks = mask.expand(-1, num_kv_heads, 1, -1).reshape(-1, 1, block_size)
        folded, scores, outputs = (
            whole.view(num_pairs * num_kv_heads, group, -1) for whole in (self.paired, self.scores, self.outputs)
        )
        self.chains: list[ChainBuffers] = []
        for part, first_block in slices:
            at = slice(part.start * num_kv_heads, part.stop * num_kv_heads)
            first = first_block * num_kv_heads * block_size * head_dim
            self.chains.append(ChainBuffers(folded[at], masks[at], scores[at], outputs[at], first))


class LoneRows:
    """The single-row sequences of one step on CPU.

    Args:
        sequences: all with one row.
        cache: one layer's.
    """

    def __init__(self, sequences: Sequence[SequencePlan], cache: torch.Tensor) -> None:
        block_size = cache.shape[3]
        chains = chain_pairs(sequences, block_size)
        pairs = [pair for chain in chains for pair in chain]
        self._num_sequences = len(sequences)
        self._rows = torch.tensor([sequence.first_row for sequence in sequences])
        self._owners = torch.tensor([pair.sequence for pair in pairs])
        self._pair_rows = self._rows[self._owners]
        self._slices: list[tuple[slice, int]] = []
        first = 0
        for chain in chains:
            self._slices.append((slice(first, first + len(chain)), chain[0].block))
            first += len(chain)
        lengths = torch.tensor([pair.num_tokens for pair in pairs])
        beyond = torch.arange(block_size) >= lengths[:, None]
        # ``[pairs, 1, 1, block_size]``: 0 where a token counts, else minus infinity.
        self._mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001
        self._buffers: PairBuffers | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Their rows in the batch, in order."""
        return self._rows

    def attend(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention of the lone rows among ``queries``, ``[lone rows, heads * head_dim]``; see `StepAttention`."""
        if queries.dtype == torch.float32:
            return self._by_products(queries, cache)
        return self._by_flash(queries[self._pair_rows], cache)

    def _by_products(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Two batched products; keys and values are read once for all query heads that share them."""
        if self._buffers is None:
            self._buffers = PairBuffers(queries, cache, self._mask, self._slices)
        buffers = self._buffers
        torch.index_select(queries, 0, self._pair_rows, out=buffers.paired)
        _, _, _, block_size, head_dim = cache.shape
        base, scale = cache.storage_offset(), head_dim**-0.5
        stride = block_size * head_dim
        for chain in buffers.chains:
            keys = cache.as_strided(
                (chain.mask.shape[0], head_dim, block_size), (stride, 1, head_dim), base + chain.first_element
            )
            torch.baddbmm(chain.mask, chain.queries, keys.to(queries.dtype), alpha=scale, out=chain.scores)
        weights = self._exponentiate(buffers.scores)
        base += cache.stride(0)
        for chain in buffers.chains:
            values = cache.as_strided(
                (chain.mask.shape[0], block_size, head_dim), (stride, head_dim, 1), base + chain.first_element
            )
            torch.bmm(chain.scores, values.to(queries.dtype), out=chain.outputs)
        return self._sum(buffers.outputs, weights)

    def _exponentiate(self, scores: torch.Tensor) -> torch.Tensor:
        """Replace scores by exponentials relative to their sequence's largest.

        Returns:
            Their sums: of each pair, ``[pairs, heads]``, or of the only sequence, ``[1, heads]``.
        """
        if self._num_sequences == 1:
            scores.sub_(scores.amax((0, 2), keepdim=True)).exp_()
            return scores.sum((0, 2))[None]
        scores.sub_(self._best(scores.amax(-1))[..., None]).exp_()
        return scores.sum(-1)

    def _by_flash(self, paired: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """For narrow types: the kernel keeps scores in float32, which a product would round."""
        outputs: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for part, first_block in self._slices:
            blocks = slice(first_block, first_block + part.stop - part.start)
            output, weight = self._flash(
                paired[part][:, :, None],
                cache[0, blocks].to(paired.dtype),
                cache[1, blocks].to(paired.dtype),
                attn_mask=self._mask[part].to(paired.dtype),
            )
            outputs.append(output[:, :, 0])
            weights.append(weight[:, :, 0])
        logs = torch.cat(weights)
        scale = (logs - self._best(logs)).exp_()
        return self._sum(torch.cat(outputs) * scale[..., None], scale).to(paired.dtype)

    def _best(self, values: torch.Tensor) -> torch.Tensor:
        """For every pair the largest of its sequence's ``values`` ``[pairs, heads]``."""
        best = values.new_full((self._num_sequences, values.shape[1]), float("-inf"))
        best.scatter_reduce_(0, self._owners[:, None].expand_as(values), values, "amax")
        return best[self._owners]

    def _sum(self, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted mean over the pairs of each sequence, ``[lone rows, heads * head_dim]``."""
        if self._num_sequences == 1:
            total, weight = outputs.sum(0, keepdim=True), weights.sum(0, keepdim=True)
        else:
            total = outputs.new_zeros(self._num_sequences, *outputs.shape[1:]).index_add_(0, self._owners, outputs)
            weight = weights.new_zeros(self._num_sequences, weights.shape[1]).index_add_(0, self._owners, weights)
        return total.div_(weight[..., None]).flatten(1)
