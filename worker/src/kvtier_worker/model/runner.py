"""The model of one rank behind `ModelRunner`: turns steps into a plan, runs the decoder, samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.messages import SequenceStep, TokenOutput
from kvtier_worker.engine.ports import LayerGate
from kvtier_worker.model.decoder import Decoder
from kvtier_worker.model.sampler import sample
from kvtier_worker.model.step import plan_step


class PagedRunner:
    """Computes steps against a paged cache that somebody else owns. One compute thread.

    Args:
        decoder: the rank's model.
        layout: of this rank's blocks.
        cache: ``[layers, 2, blocks, kv_heads, block_size, head_dim]`` on the decoder's device,
            contiguous; dimension 1 is keys, values.

    Raises:
        ValueError: the cache has another shape than the model asks for, or is not contiguous.
    """

    def __init__(self, decoder: Decoder, layout: DomainLayout, cache: torch.Tensor) -> None:
        if not cache.is_contiguous():
            raise ValueError("the cache must be contiguous")
        shard = decoder.shard
        expected = (shard.config.num_layers, 2, shard.num_kv_heads, shard.config.head_dim)
        if cache.dim() != 6 or (*cache.shape[:2], cache.shape[3], cache.shape[5]) != expected:  # noqa: PLR2004
            raise ValueError(
                f"cache has shape {tuple(cache.shape)}; expected [layers, 2, blocks, kv_heads, block_size, head_dim] "
                f"with layers, 2, kv_heads, head_dim = {expected}"
            )
        self._decoder = decoder
        self._layout = layout
        self._caches = cache.unbind(0)
        self._num_blocks, self._block_size = cache.shape[2], cache.shape[4]

    @property
    def layout(self) -> DomainLayout:
        """Layout of this rank's cache blocks."""
        return self._layout

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceStep], gate: LayerGate | None) -> Sequence[TokenOutput]:
        """See `ModelRunner`. Outputs are in the order of the sampling sequences; only rank 0 has any.

        Raises:
            ProtocolError: a step that cache or model cannot hold; nothing was computed.
            TransferFailed: a restore failed; nothing of the step may be used.
        """
        config = self._decoder.shard.config
        plan = plan_step(
            sequences,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            vocab_size=config.vocab_size,
            num_positions=config.max_position,
        )
        if not plan.sequences:
            return []
        logits = self._decoder.forward(plan, self._caches, gate)
        if logits is None:
            self._await_device()
            return []
        return sample(logits, [step for step in sequences if step.sample])

    def _await_device(self) -> None:
        """No token is read that would wait for the step; its time and its errors must not become the next one's."""
        device = self._decoder.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
