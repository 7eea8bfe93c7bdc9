"""Attention of a step over the paged cache.

One layer's cache is ``[2, blocks, kv_heads, block_size, head_dim]``, keys and values. Heads come before tokens, so
that what one head reads of a block is one contiguous range: with tokens first, decoding took 1.8 times as long.

An implementation is made once per step, where it turns block tables into index tensors, and called once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from kvtier_worker.model.step import SequencePlan


class StepAttention(Protocol):
    """Attention of every row of one step, layer by layer."""

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """Attend.

        Args:
            queries: ``[rows, heads, head_dim]``, rotated.
            keys: of the new tokens, ``[rows, kv_heads, head_dim]``, rotated; for sequences of several rows only.
            values: likewise.
            cache: of the layer; holds the new tokens too.

        Returns:
            ``[rows, heads * head_dim]``.
        """


class AttentionFactory(Protocol):
    """Makes the attention of a step."""

    def __call__(self, sequences: Sequence[SequencePlan], cache: torch.Tensor) -> StepAttention:
        """``sequences`` cover the step's rows in order; ``cache`` is any layer's, for shape, dtype and device."""


class ContextGather:
    """The context of one sequence in one piece, in order: a copy, whatever the block table."""

    def __init__(self, sequence: SequencePlan, cache: torch.Tensor) -> None:
        self._num_context = sequence.num_context
        num_blocks = -(-sequence.num_context // cache.shape[3])
        blocks = sequence.block_table[:num_blocks]
        first = blocks[0]
        self._dense = slice(first, first + num_blocks) if blocks == tuple(range(first, first + num_blocks)) else None
        self._blocks = torch.tensor(blocks, device=cache.device)

    def __call__(self, cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each ``[1, kv_heads, num_context, head_dim]``."""
        by_head = cache.transpose(1, 2)
        part = by_head.index_select(2, self._blocks) if self._dense is None else by_head[:, :, self._dense]
        whole = part.flatten(2, 3)[:, :, : self._num_context].to(dtype)
        return whole[:1], whole[1:]


class PlainAttention:
    """Any device: gathers each context and masks explicitly."""

    def __init__(self, sequences: Sequence[SequencePlan], cache: torch.Tensor) -> None:
        self._sequences = [
            (sequence, ContextGather(sequence, cache) if sequence.num_context else None, self._mask(sequence, cache))
            for sequence in sequences
        ]

    @staticmethod
    def _mask(sequence: SequencePlan, cache: torch.Tensor) -> torch.Tensor | None:
        if sequence.num_rows == 1:
            return None
        shape = (sequence.num_rows, sequence.num_context + sequence.num_rows)
        return torch.ones(shape, dtype=torch.bool, device=cache.device).tril(sequence.num_context)

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """See `StepAttention`."""
        pieces: list[torch.Tensor] = []
        for sequence, gather, mask in self._sequences:
            rows = slice(sequence.first_row, sequence.stop_row)
            parts = [] if gather is None else [gather(cache, queries.dtype)]
            if sequence.num_rows > 1:
                parts.append((keys[rows].transpose(0, 1)[None], values[rows].transpose(0, 1)[None]))
            output = functional.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                torch.cat([part[0] for part in parts], dim=2),
                torch.cat([part[1] for part in parts], dim=2),
                attn_mask=mask,
                enable_gqa=True,
            )
            pieces.append(output[0].transpose(0, 1).flatten(1))
        return torch.cat(pieces)
