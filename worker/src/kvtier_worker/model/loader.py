"""Builds one rank's layers from a checkpoint: names, shapes, which slice goes where, and what is fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier_worker.errors import ConfigError
from kvtier_worker.model.config import ModelConfig
from kvtier_worker.model.linear import Linear, LinearFactory
from kvtier_worker.model.rope import pairwise_order
from kvtier_worker.model.shard import Shard
from kvtier_worker.model.weights import EVERYTHING, TensorSource

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. ``qkv`` is the fusion of the q, k and v projections, q and k in pairwise order (`rope.py`)."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of one rank. ``embedding`` has its rows of the vocabulary, padded to `Shard.vocab_per_rank`."""

    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    lm_head: Linear


def expected_tensors(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must have, with its shape."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        expected[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        projections = {
            "self_attn.q_proj": (queries, hidden, config.qkv_bias),
            "self_attn.k_proj": (keys, hidden, config.qkv_bias),
            "self_attn.v_proj": (keys, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, queries, config.output_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        for name, (rows, columns, biased) in projections.items():
            expected[f"{layer}{name}.weight"] = (rows, columns)
            if biased:
                expected[f"{layer}{name}.bias"] = (rows,)
        expected[f"{layer}input_layernorm.weight"] = (hidden,)
        expected[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        if config.family.qk_norm:
            expected[f"{layer}self_attn.q_norm.weight"] = (head,)
            expected[f"{layer}self_attn.k_norm.weight"] = (head,)
    return expected


class Loader:
    """Reads one rank's part of a model.

    Args:
        shard: which part.
        source: where tensors come from.
        device: where they go.
        dtype: what they become.

    Raises:
        ConfigError: the source lacks tensors or has other shapes; all are named.
    """

    def __init__(self, shard: Shard, source: TensorSource, device: torch.device, dtype: torch.dtype) -> None:
        self._shard = shard
        self._config = shard.config
        self._source = source
        self._device = device
        self._dtype = dtype
        self._linear = LinearFactory(device, dtype)
        self._expected = expected_tensors(shard.config)
        if violations := source.violations(self._expected):
            raise ConfigError(violations)

    def load(self) -> DecoderWeights:
        """All weights; at no time more than one tensor beside what is kept."""
        embedding = self._vocabulary(EMBEDDING)
        tied = self._config.tie_word_embeddings
        # A tied matrix stays unpacked: the lookup needs its rows, and a packed copy would be a second one.
        lm_head = self._linear(embedding, pack=False) if tied else self._linear(self._vocabulary(LM_HEAD))
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(self._layer(f"model.layers.{index}.") for index in range(self._config.num_layers)),
            final_norm=self._read(FINAL_NORM),
            lm_head=lm_head,
        )

    def _read(self, name: str, rows: slice = EVERYTHING, columns: slice = EVERYTHING) -> torch.Tensor:
        tensor = self._source.read(name, self._expected[name], rows, columns)
        return tensor.to(device=self._device, dtype=self._dtype)

    def _vocabulary(self, name: str) -> torch.Tensor:
        part = self._read(name, self._shard.vocab)
        missing = self._shard.vocab_per_rank - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part

    def _layer(self, prefix: str) -> LayerWeights:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        has_norm = self._config.family.qk_norm
        return LayerWeights(
            input_norm=self._read(prefix + "input_layernorm.weight"),
            qkv=self._qkv(attention),
            q_norm=self._pairwise(self._read(attention + "q_norm.weight")) if has_norm else None,
            k_norm=self._pairwise(self._read(attention + "k_norm.weight")) if has_norm else None,
            output=self._row_parallel(attention + "o_proj", self._shard.head_rows(self._config.num_heads)),
            post_norm=self._read(prefix + "post_attention_layernorm.weight"),
            gate=self._column_parallel(mlp + "gate_proj"),
            up=self._column_parallel(mlp + "up_proj"),
            down=self._row_parallel(mlp + "down_proj", self._shard.mlp),
        )

    def _qkv(self, attention: str) -> Linear:
        config = self._config
        query_rows, key_rows = self._shard.head_rows(config.num_heads), self._shard.head_rows(config.num_kv_heads)
        parts = (("q_proj", query_rows), ("k_proj", key_rows), ("v_proj", key_rows))

        def fused(kind: str) -> torch.Tensor:
            tensors = [self._read(f"{attention}{name}.{kind}", rows) for name, rows in parts]
            return torch.cat([self._pairwise(tensors[0]), self._pairwise(tensors[1]), tensors[2]])

        return self._linear(fused("weight"), fused("bias") if config.qkv_bias else None)

    def _pairwise(self, rows: torch.Tensor) -> torch.Tensor:
        order = pairwise_order(self._config.head_dim).to(rows.device)
        return rows.view(-1, self._config.head_dim, *rows.shape[1:])[:, order].flatten(0, 1)

    def _column_parallel(self, name: str) -> Linear:
        rows = self._shard.mlp
        return self._linear(
            self._read(f"{name}.weight", rows), self._read(f"{name}.bias", rows) if self._config.mlp_bias else None
        )

    def _row_parallel(self, name: str, columns: slice) -> Linear:
        # The ranks' products are summed, so the bias must come in once.
        biased = f"{name}.bias" in self._expected and self._shard.rank == 0
        return self._linear(
            self._read(f"{name}.weight", columns=columns), self._read(f"{name}.bias") if biased else None
        )
