"""Attention of a step over the paged cache.

Keys and values of one layer are ``[blocks, block_size, kv_heads, head_dim]``; seen as token slots they are
``[slots, kv_heads, head_dim]``, and a run of neighbouring blocks is a plain view of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from kvtier_worker.model.step import SequencePlan

MAX_RUNS = 4
"""A context in more runs than this is gathered into one piece first; below, every run costs one more kernel call."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache on this rank; both tensors ``[blocks, block_size, kv_heads, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


class Attention(Protocol):
    """Attention of every row of a step."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: LayerCache,
        sequences: Sequence[SequencePlan],
    ) -> torch.Tensor:
        """Attend.

        Args:
            queries: ``[rows, heads, head_dim]``, rotated.
            keys: of the new tokens, ``[rows, kv_heads, head_dim]``, rotated; for sequences of several rows only.
            values: likewise.
            cache: holds the new tokens too.
            sequences: covers the rows, in order.

        Returns:
            ``[rows, heads * head_dim]``.
        """


def _gather(cache: torch.Tensor, sequence: SequencePlan, dtype: torch.dtype) -> torch.Tensor:
    """The sequence's context in one piece and in order: ``[num_context, kv_heads, head_dim]``."""
    num_blocks = -(-sequence.num_context // cache.shape[1])
    blocks = torch.tensor(sequence.block_table[:num_blocks], device=cache.device)
    return cache.index_select(0, blocks).flatten(0, 1)[: sequence.num_context].to(dtype)


class CpuAttention:
    """Built on torch's flash kernel for CPU, whose log-sum-exp lets parts be joined: context runs and new tokens."""

    def __init__(self) -> None:
        self._kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: LayerCache,
        sequences: Sequence[SequencePlan],
    ) -> torch.Tensor:
        """See `Attention`."""
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for sequence in sequences:
            rows = slice(sequence.first_row, sequence.stop_row)
            own = None if sequence.num_rows == 1 else (keys[rows], values[rows])
            result[rows] = self._sequence(queries[rows], own, cache, sequence)
        return result.flatten(1)

    def _sequence(
        self,
        queries: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        sequence: SequencePlan,
    ) -> torch.Tensor:
        parts = [(keys, values, False) for keys, values in _context(cache, sequence, queries.dtype)]
        if own is not None:
            parts.append((*own, True))
        joined, joined_weight = self._attend(queries, *parts[0])
        for part in parts[1:]:
            output, weight = self._attend(queries, *part)
            share = torch.sigmoid(weight - joined_weight)
            joined = torch.lerp(joined.float(), output.float(), share)
            joined_weight = torch.logaddexp(joined_weight, weight)
        return joined.to(queries.dtype)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[rows, heads, head_dim]`` and log-sum-exp ``[rows, heads, 1]``."""
        output, weight = self._kernel(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], 0.0, causal
        )
        return output[0].transpose(0, 1), weight[0].transpose(0, 1)[..., None]


def _context(
    cache: LayerCache, sequence: SequencePlan, dtype: torch.dtype
) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the context: views of its runs, or one gathered piece when there are many."""
    if len(sequence.context_runs) > MAX_RUNS:
        return [(_gather(cache.keys, sequence, dtype), _gather(cache.values, sequence, dtype))]
    keys, values = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
    return [(keys[start:stop].to(dtype), values[start:stop].to(dtype)) for start, stop in sequence.context_runs]


class PlainAttention:
    """Any device: gathers each context and masks explicitly."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: LayerCache,
        sequences: Sequence[SequencePlan],
    ) -> torch.Tensor:
        """See `Attention`."""
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for sequence in sequences:
            rows = slice(sequence.first_row, sequence.stop_row)
            context_keys = _gather(cache.keys, sequence, queries.dtype)
            context_values = _gather(cache.values, sequence, queries.dtype)
            mask = None
            if sequence.num_rows > 1:
                context_keys = torch.cat([context_keys, keys[rows]])
                context_values = torch.cat([context_values, values[rows]])
                shape = (sequence.num_rows, context_keys.shape[0])
                mask = torch.ones(shape, dtype=torch.bool, device=queries.device).tril(sequence.num_context)
            output = functional.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                context_keys.transpose(0, 1)[None],
                context_values.transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            result[rows] = output[0].transpose(0, 1)
        return result.flatten(1)


def attention_for(device: torch.device) -> Attention:
    """The best implementation for ``device``."""
    return CpuAttention() if device.type == "cpu" else PlainAttention()
