"""The decoder that all families share: norms, fused projections, rotation, attention, gated MLP, logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvtier_worker.engine.ports import LayerGate
from kvtier_worker.errors import TransferFailed
from kvtier_worker.model.attention import AttentionFactory, PlainAttention, StepAttention
from kvtier_worker.model.collective import Collective
from kvtier_worker.model.cpu_attention import CpuAttention
from kvtier_worker.model.loader import DecoderWeights, LayerWeights
from kvtier_worker.model.rope import rotate, rotation_table
from kvtier_worker.model.shard import Shard
from kvtier_worker.model.step import StepPlan


class GateKeeper:
    """Waits for each layer's restores, and keeps ranks in step when that fails.

    A rank that stopped in the middle of a step would leave the others waiting in a collective for ever. With several
    ranks a failed one therefore computes on, on whatever is in the cache, and the failure is raised at the end of
    the step; nothing of such a step may be used.
    """

    def __init__(self, gate: LayerGate | None, *, alone: bool) -> None:
        self._gate = gate
        self._alone = alone
        self._failure: TransferFailed | None = None

    def wait(self, layer: int) -> None:
        """Before ``layer``'s cache is touched."""
        if self._gate is None or self._failure is not None:
            return
        try:
            self._gate.wait(layer)
        except TransferFailed as failure:
            if self._alone:
                raise
            self._failure = failure

    def finish(self) -> None:
        """After the last collective of the step; raises what `wait` kept back."""
        if self._failure is not None:
            raise self._failure


class CacheWriter:
    """Puts a step's keys and values where its plan says, layer by layer.

    A block that is begun but not filled is zeroed first: attention reads whole blocks and gives what lies beyond the
    last token no weight, but no weight times what an overflow left there would still be NaN.
    """

    def __init__(self, plan: StepPlan, device: torch.device) -> None:
        self._block_size = plan.block_size
        self._whole = plan.block_writes
        self._single = bool(plan.row_writes)
        rows = [write.row for write in plan.row_writes]
        every = rows == list(range(len(plan.token_ids)))
        self._rows = slice(None) if every else torch.tensor(rows, device=device)
        self._blocks = torch.tensor([write.block for write in plan.row_writes], device=device)
        self._offsets = torch.tensor([write.offset for write in plan.row_writes], device=device)
        self._begun = [write.block for write in plan.row_writes if write.offset == 0]

    def write(self, entries: torch.Tensor, cache: torch.Tensor) -> None:
        """``entries`` ``[rows, 2 * kv_heads, head_dim]``, keys then values; ``cache`` as in `attention.py`."""
        by_kind = entries.view(entries.shape[0], 2, cache.shape[2], cache.shape[4])
        for write in self._whole:
            stop = write.first_row + write.num_blocks * self._block_size
            rows = by_kind[write.first_row : stop].view(write.num_blocks, self._block_size, *by_kind.shape[1:])
            cache[:, write.first_block : write.first_block + write.num_blocks] = rows.permute(2, 0, 3, 1, 4)
        for block in self._begun:
            cache[:, block].zero_()
        if self._single:
            slots = cache.permute(1, 3, 0, 2, 4)
            slots.index_put_((self._blocks, self._offsets), by_kind[self._rows].to(cache.dtype))


class Decoder:
    """One rank's part of a model. Stateless between steps: what it remembers is in the cache it is given.

    Attributes:
        shard: which part.
        collective: the other ranks.
        device: where weights are.
        dtype: of weights and activations.
    """

    def __init__(self, shard: Shard, weights: DecoderWeights, collective: Collective, device: torch.device) -> None:
        self.shard = shard
        self.collective = collective
        self.device = device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._attention: AttentionFactory = CpuAttention if device.type == "cpu" else PlainAttention
        config = shard.config
        self._eps = torch.tensor([config.rms_norm_eps], device=device)
        self._rotations = rotation_table(config.rope, config.head_dim, config.max_position).to(device)

    def forward(self, plan: StepPlan, caches: Sequence[torch.Tensor], gate: LayerGate | None) -> torch.Tensor | None:
        """Compute one step and write its keys and values to the cache.

        Returns:
            Float32 logits of the sampling rows, ``[sampling rows, vocab]``, on rank 0 when there are any; else None.

        Raises:
            TransferFailed: the gate said so.
        """
        keeper = GateKeeper(gate, alone=self.collective.size == 1)
        rotations = self._rotations[torch.tensor(plan.positions, device=self.device)][:, None]
        hidden = self._embed(torch.tensor(plan.token_ids, device=self.device))
        writer = CacheWriter(plan, self.device)
        attention = self._attention(plan.sequences, caches[0])
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            heads = self._project(layer, hidden, rotations)
            keeper.wait(index)
            writer.write(heads[:, self.shard.num_heads :], caches[index])
            if index < last:
                hidden = self._rest_of_layer(layer, hidden, heads, caches[index], attention)
            elif plan.sampling_rows:
                # Beyond the last layer's cache entries only the rows that sample matter.
                rows = torch.tensor(plan.sampling_rows, device=self.device)
                readers = self._attention(plan.readers, caches[0])
                hidden = self._rest_of_layer(layer, hidden[rows], heads[rows], caches[index], readers)
        logits = self._logits(hidden) if plan.sampling_rows else None
        keeper.finish()
        return logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.collective.size == 1:
            return functional.embedding(token_ids, self._weights.embedding)
        part = self.shard.vocab
        elsewhere = (token_ids < part.start) | (token_ids >= part.stop)
        hidden = functional.embedding((token_ids - part.start).masked_fill(elsewhere, 0), self._weights.embedding)
        hidden.masked_fill_(elsewhere[:, None], 0)
        self.collective.all_reduce(hidden)
        return hidden

    def _project(self, layer: LayerWeights, hidden: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Queries, keys (both rotated) and values of every row: ``[rows, heads + 2 * kv_heads, head_dim]``."""
        projected = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = projected.view(projected.shape[0], -1, self.shard.config.head_dim)
        num_heads, num_kv_heads = self.shard.num_heads, self.shard.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
            queries.copy_(self._norm(queries, layer.q_norm))
            keys.copy_(self._norm(keys, layer.k_norm))
        rotate(heads[:, : num_heads + num_kv_heads], rotations)
        return heads

    def _rest_of_layer(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        heads: torch.Tensor,
        cache: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        first_key = self.shard.num_heads
        first_value = first_key + self.shard.num_kv_heads
        queries, keys, values = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        attended = attention(queries, keys, values, cache)
        first = self.collective.rank == 0
        # The residual is summed with the ranks' products, so only one rank may bring it in.
        hidden = layer.output.plus(attended, hidden) if first else layer.output(attended)
        self.collective.all_reduce(hidden)
        normed = self._norm(hidden, layer.post_norm)
        inner = layer.up.times(normed, layer.gate.silu(normed))
        hidden = layer.down.plus(inner, hidden) if first else layer.down(inner)
        self.collective.all_reduce(hidden)
        return hidden

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Two passes over x; torch's own takes more on CPU. The mean square is float32 whatever x is.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        normed: torch.Tensor = (x * scale).to(x.dtype).mul_(weight)
        return normed

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        part = self._weights.lm_head(self._norm(hidden, self._weights.final_norm)).float()
        whole = self.collective.gather(part)
        return None if whole is None else whole[:, : self.shard.config.vocab_size]
