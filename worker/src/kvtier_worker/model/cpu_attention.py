"""Attention on CPU: torch's flash kernel for chunks of prompts, `LoneRows` for decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_worker.model.attention import ContextGather
from kvtier_worker.model.lone_rows import LoneRows
from kvtier_worker.model.step import SequencePlan


class ChunkRows:
    """One sequence of several rows: everything before them from the cache, themselves causally, joined.

    The two parts need no mask tensor: the first attends to all, the second is the kernel's own causal mode. What
    joins them is the log-sum-exp that the kernel returns beside its output.
    """

    def __init__(self, sequence: SequencePlan, cache: torch.Tensor) -> None:
        self._rows = slice(sequence.first_row, sequence.stop_row)
        self._context = ContextGather(sequence, cache) if sequence.num_context else None
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return self._rows

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """``[its rows, heads * head_dim]``; arguments as of `StepAttention`."""
        own = queries[self._rows].transpose(0, 1)[None]
        output, weight = self._flash(
            own, keys[self._rows].transpose(0, 1)[None], values[self._rows].transpose(0, 1)[None], 0.0, True
        )
        if self._context is not None:
            earlier, earlier_weight = self._flash(own, *self._context(cache, queries.dtype))
            share = torch.sigmoid(earlier_weight - weight)[..., None]
            output = torch.lerp(output.float(), earlier.float(), share).to(queries.dtype)
        result: torch.Tensor = output[0].transpose(0, 1).flatten(1)
        return result


class CpuAttention:
    """See `StepAttention`."""

    def __init__(self, sequences: Sequence[SequencePlan], cache: torch.Tensor) -> None:
        lone = [sequence for sequence in sequences if sequence.num_rows == 1]
        self._lone = LoneRows(lone, cache) if lone else None
        self._chunks = [ChunkRows(sequence, cache) for sequence in sequences if sequence.num_rows > 1]

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor
    ) -> torch.Tensor:
        """See `StepAttention`."""
        if self._lone is not None and not self._chunks:
            return self._lone.attend(queries, cache)
        if self._lone is None and len(self._chunks) == 1:
            return self._chunks[0].attend(queries, keys, values, cache)
        result = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        if self._lone is not None:
            result[self._lone.rows] = self._lone.attend(queries, cache)
        for chunk in self._chunks:
            result[chunk.rows] = chunk.attend(queries, keys, values, cache)
        return result
