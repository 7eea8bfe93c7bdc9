"""Every family and every rotary variant against `transformers`, float32, tiny random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.messages import SamplingSpec, SequenceStep
from kvtier_worker.model.collective import SingleRank
from kvtier_worker.model.factory import build_runner, cache_dtype, cache_shape, kv_layout, load_config, load_decoder
from kvtier_worker.model.step import plan_step
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BLOCK, NUM_BLOCKS, VOCAB = 8, 80, 157
CPU = torch.device("cpu")
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
    "qwen3 tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 10}),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1000000.0},
    "yarn with all its numbers": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 100,
        "rope_theta": 10000.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
    },
}


def oracle_in(folder: Path, family: str, rope: dict[str, Any]) -> Any:
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(len(family))
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 60,
            "intermediate_size": 52,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "rope_parameters": dict(rope),
        }
        | extra
    )
    oracle = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    oracle.save_pretrained(folder)
    return oracle


class Ours:
    """Our model of a folder over a scattered cache."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = WorkerSettings(model=str(folder), device="cpu", **settings)
        config = load_config(folder)
        layout = kv_layout(config, 1, BLOCK, cache_dtype(self.settings, config, CPU))
        self.decoder = load_decoder(self.settings, config, SingleRank())
        self.cache = torch.zeros(cache_shape(layout, NUM_BLOCKS))
        self.runner = build_runner(self.decoder, layout, self.cache)
        self.config = config

    @torch.inference_mode()
    def logits(self, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
        """Of the last token."""
        plan = plan_step(
            [SequenceStep("r", tokens, start, table, sample=True)],
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCAB,
            num_positions=self.config.max_position,
        )
        logits = self.decoder.forward(plan, self.cache.unbind(0), None)
        assert logits is not None
        return logits[0]


def check(folder: Path, oracle: Any, seed: int) -> None:
    """Logits after random chunks, and greedy tokens, are the oracle's."""
    dice = random.Random(seed)
    tokens = [dice.randrange(VOCAB) for _ in range(180)]
    table = list(range(1, 1 + 30))
    dice.shuffle(table)
    ours = Ours(folder)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    start = 0
    while start < len(tokens):
        count = min(dice.choice([1, 7, 8, 40, 90]), len(tokens) - start)
        logits = ours.logits(tokens[start : start + count], start, table)
        start += count
        torch.testing.assert_close(logits, expected[start - 1], atol=1e-4, rtol=1e-4)
    inputs = torch.tensor([tokens])
    answer = oracle.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    generated = answer[0, len(tokens) :].tolist()
    greedy = SamplingSpec(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, None)
    found = [int(logits.argmax())]
    while len(found) < len(generated):
        step = SequenceStep("r", found[-1:], len(tokens) + len(found) - 1, table, sample=True, sampling=greedy)
        found.append(ours.runner.forward([step], None)[0].token_id)
    assert found == generated


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_the_oracle_computes(tmp_path: Path, family: str) -> None:
    check(tmp_path, oracle_in(tmp_path, family, ROPES["default"]), seed=1)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_rotary_variant_computes_what_the_oracle_computes(tmp_path: Path, family: str, rope: str) -> None:
    check(tmp_path, oracle_in(tmp_path, family, ROPES[rope]), seed=2)


def test_a_sharded_checkpoint_computes_what_the_oracle_computes(tmp_path: Path) -> None:
    oracle = oracle_in(tmp_path / "whole", "qwen2", ROPES["default"])
    oracle.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    check(tmp_path / "shards", oracle, seed=3)
