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
        self._slices: list[tuple[slice, slice]] = []
        first = 0
        for chain in chains:
            blocks = slice(chain[0].block, chain[0].block + len(chain))
            self._slices.append((slice(first, first + len(chain)), blocks))
            first += len(chain)
        lengths = torch.tensor([pair.num_tokens for pair in pairs])
        beyond = torch.arange(block_size) >= lengths[:, None]
        # ``[pairs, 1, 1, block_size]``: 0 where a token counts, else minus infinity.
        self._mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001

    @property
    def rows(self) -> torch.Tensor:
        """Their rows in the batch, in order."""
        return self._rows

    def attend(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Attention of the lone rows among ``queries``, ``[lone rows, heads * head_dim]``; see `StepAttention`."""
        paired = queries[self._pair_rows]
        if queries.dtype == torch.float32:
            return self._by_products(paired, cache)
        return self._by_flash(paired, cache)

    def _by_products(self, paired: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Two batched products; keys and values are read once for all query heads that share them."""
        num_pairs, num_heads, head_dim = paired.shape
        _, _, num_kv_heads, block_size, _ = cache.shape
        group = num_heads // num_kv_heads
        products = num_pairs * num_kv_heads
        mask = self._mask.expand(-1, num_kv_heads, 1, -1).reshape(products, 1, block_size)
        folded = paired.view(products, group, head_dim)
        scores = paired.new_empty(products, group, block_size)
        for part, blocks in self._slices:
            at = slice(part.start * num_kv_heads, part.stop * num_kv_heads)
            keys = cache[0, blocks].to(paired.dtype).view(-1, block_size, head_dim).transpose(1, 2)
            torch.baddbmm(mask[at], folded[at], keys, alpha=head_dim**-0.5, out=scores[at])
        best = self._best(scores.view(num_pairs, num_heads, block_size).amax(-1))
        scores.view(num_pairs, num_heads, block_size).sub_(best[..., None])
        scores.exp_()
        weights = scores.sum(-1).view(num_pairs, num_heads)
        outputs = torch.empty_like(folded)
        for part, blocks in self._slices:
            at = slice(part.start * num_kv_heads, part.stop * num_kv_heads)
            values = cache[1, blocks].to(paired.dtype).view(-1, block_size, head_dim)
            torch.bmm(scores[at], values, out=outputs[at])
        return self._sum(outputs.view(num_pairs, num_heads, head_dim), weights)

    def _by_flash(self, paired: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """For narrow types: the kernel keeps scores in float32, which a product would round."""
        outputs: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        for part, blocks in self._slices:
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
        if self._num_sequences == 1:
            return values.amax(0, keepdim=True)
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
