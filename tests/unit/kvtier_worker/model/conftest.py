"""A tiny model with random weights, and the sequences to run it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import DType
from kvtier_worker.engine.messages import SequenceStep
from kvtier_worker.model.collective import Collective, SingleRank
from kvtier_worker.model.config import ModelConfig, parse_config
from kvtier_worker.model.decoder import Decoder
from kvtier_worker.model.factory import build_runner, cache_shape, kv_layout, load_decoder, torch_dtype
from kvtier_worker.model.runner import PagedRunner
from kvtier_worker.model.step import plan_step

BLOCK = 8
NUM_BLOCKS = 64

TINY: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class TinyModel:
    """One rank of a tiny model over a cache full of NaN, so that reading what nobody wrote shows."""

    def __init__(self, config: ModelConfig, collective: Collective | None = None, dtype: str = "float32") -> None:
        settings = WorkerSettings(load_format="dummy", dtype=dtype, device="cpu", seed=3)
        collective = collective or SingleRank()
        self.decoder: Decoder = load_decoder(settings, config, collective)
        layout = kv_layout(config, collective.size, BLOCK, DType[dtype.upper()])
        self.cache = torch.full(cache_shape(layout, NUM_BLOCKS), float("nan"), dtype=torch_dtype(DType[dtype.upper()]))
        self.runner: PagedRunner = build_runner(self.decoder, layout, self.cache)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[SequenceStep]) -> torch.Tensor | None:
        """Logits of the sampling rows."""
        config = self.decoder.shard.config
        plan = plan_step(
            sequences,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            vocab_size=config.vocab_size,
            num_positions=config.max_position,
        )
        return self.decoder.forward(plan, self.cache.unbind(0), None)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Llama with the head counts of SmolLM2."""
    return parse_config(TINY)


@pytest.fixture
def tiny(tiny_config: ModelConfig) -> TinyModel:
    """It on one rank."""
    return TinyModel(tiny_config)


@pytest.fixture
def make_tiny() -> Callable[..., TinyModel]:
    """Constructor of `TinyModel`."""
    return TinyModel


@pytest.fixture
def tiny_raw() -> dict[str, Any]:
    """Its config.json."""
    return dict(TINY)
