"""Are the values of a model's JSON files of the types that the rest of the reader takes for granted? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_WHOLE = ("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "original_max_position_embeddings")
_REAL = (
    "rms_norm_eps",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
)
_ROPE = ("rope_parameters", "rope_scaling")
_LISTS = ("architectures", "layer_types")


def wrong_types(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence for each value of config.json and generation_config.json whose type cannot be read."""
    found = [*_wrong_numbers("config.json", raw)]
    for section in _ROPE:
        inner = raw.get(section)
        if isinstance(inner, Mapping):
            found += _wrong_numbers(f"config.json: {section}", inner)
        elif inner is not None:
            found.append(f"config.json: {section} is {inner!r}; it must be an object")
    for name in _LISTS:
        if raw.get(name) is not None and not isinstance(raw[name], list):
            found.append(f"config.json: {name} is {raw[name]!r}; it must be a list")
    for file, content in (("config.json", raw), ("generation_config.json", generation)):
        ids = content.get("eos_token_id")
        if not all(map(_is_whole, ids if isinstance(ids, list) else [ids])):
            found.append(f"{file}: eos_token_id is {ids!r}; it must be a token id or a list of them")
    return tuple(found)


def _wrong_numbers(where: str, content: Mapping[str, Any]) -> Iterator[str]:
    colon = "" if ":" in where else ":"
    for name in _WHOLE:
        if not _is_whole(content.get(name)):
            yield f"{where}{colon} {name} is {content[name]!r}; it must be a whole number"
    for name in _REAL:
        if not _is_real(content.get(name)):
            yield f"{where}{colon} {name} is {content[name]!r}; it must be a number"


def _is_whole(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_real(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)
