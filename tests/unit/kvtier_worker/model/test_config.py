from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kvtier_worker.core.ids import DType
from kvtier_worker.errors import ConfigError
from kvtier_worker.model.config import load_config, parse_config
from kvtier_worker.model.rope_config import RopeKind


def violations_of(raw: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    return caught.value.violations


def test_head_size_and_kv_heads_are_derived_when_the_config_names_none(tiny_raw: dict[str, Any]) -> None:
    del tiny_raw["num_key_value_heads"]
    config = parse_config(tiny_raw)
    assert (config.num_kv_heads, config.head_dim) == (9, 8)


def test_qwen2_has_biases_on_q_k_v_whatever_the_config_says(tiny_raw: dict[str, Any]) -> None:
    config = parse_config(tiny_raw | {"architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_qwen3_takes_its_own_head_size_and_the_config_decides_on_biases(tiny_raw: dict[str, Any]) -> None:
    raw = tiny_raw | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}
    config = parse_config(raw)
    assert config.family.qk_norm
    assert (config.head_dim, config.qkv_bias, config.output_bias) == (128, True, True)
    assert parse_config(raw | {"head_dim": 16}).head_dim == 16


def test_model_type_decides_where_no_architecture_is_named(tiny_raw: dict[str, Any]) -> None:
    del tiny_raw["architectures"]
    assert parse_config(tiny_raw | {"model_type": "qwen2"}).family.name == "qwen2"


def test_an_unknown_architecture_is_refused_with_the_supported_ones(tiny_raw: dict[str, Any]) -> None:
    (message,) = violations_of(tiny_raw | {"architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in message
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in message


def test_everything_wrong_with_a_config_is_reported_at_once(tiny_raw: dict[str, Any]) -> None:
    found = violations_of(
        tiny_raw
        | {
            "hidden_act": "gelu",
            "quantization_config": {"quant_method": "awq"},
            "vocab_size": 0,
            "num_key_value_heads": 4,
            "rope_scaling": {"rope_type": "longrope"},
        }
    )
    for part in ("'gelu'", "'awq'", "vocab_size is 0", "num_key_value_heads 4", "'longrope'"):
        assert any(part in message for message in found), part
    assert len(found) == 5


@pytest.mark.parametrize(("tp_size", "fits"), [(1, True), (3, True), (2, False), (9, False)])
def test_ranks_must_divide_both_kinds_of_heads(tiny_raw: dict[str, Any], tp_size: int, fits: bool) -> None:
    found = parse_config(tiny_raw).violations(tp_size=tp_size)
    assert (not found) == fits
    for message in found:
        assert f"--tp_size is {tp_size}" in message
        assert "use one of [1, 3]" in message


def test_a_length_beyond_the_model_is_refused_with_both_numbers(tiny_raw: dict[str, Any]) -> None:
    (message,) = parse_config(tiny_raw).violations(max_model_len=513)
    assert "513" in message
    assert "512" in message


def test_a_sliding_window_is_refused_unless_no_sequence_reaches_it(tiny_raw: dict[str, Any]) -> None:
    config = parse_config(tiny_raw | {"architectures": ["MistralForCausalLM"], "sliding_window": 128})
    (message,) = config.violations()
    assert "sliding_window is 128" in message
    assert "--max_model_len" in message
    assert config.violations(max_model_len=128) == ()


def test_a_mistral_config_without_a_window_has_the_family_default(tiny_raw: dict[str, Any]) -> None:
    raw = tiny_raw | {"architectures": ["MistralForCausalLM"]}
    assert parse_config(raw).sliding_window == 4096
    assert parse_config(raw | {"sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("extra", "window"),
    [
        ({}, None),
        ({"use_sliding_window": True}, 64),
        ({"use_sliding_window": True, "max_window_layers": 3}, None),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 3}, None),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, 64),
    ],
)
def test_a_qwen_window_counts_only_where_it_is_switched_on(
    tiny_raw: dict[str, Any], extra: dict[str, Any], window: int | None
) -> None:
    raw = tiny_raw | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64} | extra
    assert parse_config(raw).sliding_window == window


def test_rope_is_read_from_both_spellings(tiny_raw: dict[str, Any]) -> None:
    old = parse_config(tiny_raw | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    new = parse_config(tiny_raw | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}})
    assert old.rope == new.rope
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == (RopeKind.LINEAR, 5e5, 4.0)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ],
)
def test_the_longest_position_follows_from_the_rope(
    tiny_raw: dict[str, Any], scaling: dict[str, Any], longest: int
) -> None:
    assert parse_config(tiny_raw | {"rope_scaling": scaling}).max_position == longest


def test_a_scaled_rope_without_factor_is_refused(tiny_raw: dict[str, Any]) -> None:
    (message,) = violations_of(tiny_raw | {"rope_scaling": {"rope_type": "llama3"}})
    assert "factor" in message


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json") as caught:
        load_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config(tmp_path)


def test_generation_config_decides_on_the_end_of_sequence(tmp_path: Path, tiny_raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_raw | {"eos_token_id": 2, "torch_dtype": "bfloat16"}))
    config = load_config(tmp_path)
    assert (config.eos_token_ids, config.checkpoint_dtype) == ((2,), DType.BFLOAT16)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_config(tmp_path).eos_token_ids == (7, 8)


def test_values_of_a_wrong_type_are_named_together_instead_of_crashing(tiny_raw: dict[str, Any]) -> None:
    raw = tiny_raw | {
        "eos_token_id": "x",
        "head_dim": "64",
        "rms_norm_eps": None,
        "rope_theta": [1],
        "rope_scaling": {"rope_type": "yarn", "factor": "4"},
        "architectures": "LlamaForCausalLM",
    }
    found = violations_of(raw)
    named = ("head_dim", "rope_theta", "rope_scaling factor", "architectures", "eos_token_id")
    assert len(found) == len(named)
    for name in named:
        assert any(f"config.json: {name} is " in violation for violation in found), (name, found)


@pytest.mark.parametrize("ids", [2, [1, 2], None])
def test_one_many_or_no_end_tokens_are_fine(tiny_raw: dict[str, Any], ids: object) -> None:
    assert parse_config(tiny_raw | {"eos_token_id": ids}).family.name == "llama"
