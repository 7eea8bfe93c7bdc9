"""The shape of a model, read from the config.json of a Hugging Face folder. No torch: the engine process reads it too.

What a family does differently is in its own file (`llama.py`, `qwen2.py`, `qwen3.py`, `mistral.py`); this module finds
the family, reads what all have in common and reports everything that cannot work at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_worker.core.ids import DType
from kvtier_worker.errors import ConfigError
from kvtier_worker.model import llama, mistral, qwen2, qwen3
from kvtier_worker.model.config_types import wrong_types
from kvtier_worker.model.family import Family
from kvtier_worker.model.rope_config import RopeConfig, RopeKind, parse_rope

CONFIG_FILE = "config.json"
_DTYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only model, whole (before it is cut over ranks).

    Attributes:
        family: see `Family`.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        max_position: positions the model is good for (stretched by its rotary embedding).
        qkv_bias: as resolved from family and config.
        output_bias: likewise.
        mlp_bias: likewise.
        sliding_window: tokens that a layer attends to, or None for full attention.
        checkpoint_dtype: element type that the config names.
        eos_token_ids: generation ends after one of these; generation_config.json wins over config.json.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    checkpoint_dtype: DType
    eos_token_ids: tuple[int, ...]

    def violations(self, *, tp_size: int = 1, max_model_len: int = 0) -> tuple[str, ...]:
        """Why this model cannot run on ``tp_size`` ranks at ``max_model_len`` tokens (0 = `max_position`), if so."""
        found: list[str] = []
        if tp_size < 1:
            return (f"--tp_size is {tp_size}; it must be at least 1",)
        for what, count in (("attention heads", self.num_heads), ("key/value heads", self.num_kv_heads)):
            if count % tp_size:
                fits = [n for n in range(1, self.num_kv_heads + 1) if not (self.num_heads % n or self.num_kv_heads % n)]
                found.append(
                    f"--tp_size is {tp_size}, which does not divide the model's {count} {what}; use one of {fits}"
                )
        if max_model_len > self.max_position:
            found.append(
                f"--max_model_len is {max_model_len}, but the model is good for {self.max_position} positions; lower it"
            )
        longest = max_model_len or self.max_position
        if self.sliding_window is not None and self.sliding_window < longest:
            found.append(
                f"config.json: sliding_window is {self.sliding_window}, shorter than {longest} tokens; only full "
                f"attention is supported: set --max_model_len to at most {self.sliding_window}"
            )
        return tuple(found)


FAMILIES = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def load_config(path: str | Path) -> ModelConfig:
    """Read the config.json (and generation_config.json) of a model folder.

    Raises:
        ConfigError: no such file, not JSON, or one or more of its values cannot work; all are named.
    """
    folder = Path(path)
    raw = _read_json(folder / CONFIG_FILE)
    if raw is None:
        raise ConfigError(
            [f"--model is {str(path)!r}, which has no {CONFIG_FILE}; give a Hugging Face model folder on this machine"]
        )
    return parse_config(raw, _read_json(folder / "generation_config.json") or {})


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Turn the content of config.json into a `ModelConfig`.

    Raises:
        ConfigError: with every violation.
    """
    violations = [*wrong_types(raw, generation or {})]
    if violations:
        raise ConfigError(violations)
    family = _find_family(raw)
    numbers = _positive_numbers(raw, violations)
    if quantisation := raw.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else quantisation
        violations.append(
            f"config.json: quantization_config names {method!r}; supported are float32, bfloat16 and float16 weights"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        violations.append(f"config.json: hidden_act is {activation!r}; supported: 'silu'")
    rope = parse_rope(raw, violations)
    heads, hidden = numbers["num_attention_heads"], numbers["hidden_size"]
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    head_dim = int(raw.get("head_dim") or family.default_head_dim or hidden // heads)
    if heads % kv_heads:
        violations.append(
            f"config.json: num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        violations.append(f"config.json: head_dim is {head_dim}; rotary embedding needs an even one")
    if violations:
        raise ConfigError(violations)
    biased = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=numbers["vocab_size"],
        hidden_size=hidden,
        intermediate_size=numbers["intermediate_size"],
        num_layers=numbers["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position=_max_position(numbers["max_position_embeddings"], rope),
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=biased if family.qkv_bias is None else family.qkv_bias,
        output_bias=biased if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and bool(raw.get("mlp_bias", False)),
        sliding_window=_sliding_window(raw, family, numbers["num_hidden_layers"]),
        checkpoint_dtype=_DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), DType.FLOAT32),
        eos_token_ids=_eos(raw, generation or {}),
    )


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f"{path} does not hold a JSON object"])
    return content


def _find_family(raw: Mapping[str, Any]) -> Family:
    named = raw.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in named or (not named and raw.get("model_type") == family.name):
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    found = ", ".join(named) or raw.get("model_type")
    raise ConfigError([f"config.json: architecture {found!r} is not supported; supported: {supported}"])


_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def _positive_numbers(raw: Mapping[str, Any], violations: list[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        value = raw.get(name)
        if isinstance(value, int) and value > 0:
            numbers[name] = value
        else:
            violations.append(f"config.json: {name} is {value!r}; it must be a whole number above 0")
            numbers[name] = 1
    return numbers


def _max_position(trained: int, rope: RopeConfig) -> int:
    if rope.kind is RopeKind.LINEAR:
        return int(trained * rope.factor)
    if rope.kind is RopeKind.YARN:
        return max(trained, int(rope.original_max_position * rope.factor))
    return trained


def _sliding_window(raw: Mapping[str, Any], family: Family, num_layers: int) -> int | None:
    window = raw.get("sliding_window", family.default_window)
    if window is None:
        return None
    if family.window_needs_flag:
        if not raw.get("use_sliding_window", False):
            return None
        kinds = raw.get("layer_types")
        windowed = "sliding_attention" in kinds if kinds else int(raw.get("max_window_layers", 0)) < num_layers
        if not windowed:
            return None
    return int(window)


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))
