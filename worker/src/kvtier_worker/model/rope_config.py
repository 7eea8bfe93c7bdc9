"""Rotary position embedding as the config describes it: which variant, which numbers. No torch here.

Two spellings are in use: ``rope_parameters`` (transformers 5) and ``rope_scaling`` beside ``rope_theta`` (older).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DEFAULT_THETA = 10000.0


class RopeKind(StrEnum):
    """How frequencies are derived from ``theta``."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding for all layers.

    Attributes:
        theta: base wavelength.
        kind: variant. DYNAMIC equals DEFAULT up to the trained length, and positions beyond that are refused: its
            frequencies would depend on the length of the sequence, so a cached key could never be reused.
        factor: stretch of LINEAR, LLAMA3 and YARN.
        original_max_position: trained length, for LLAMA3 and YARN.
        low_freq_factor: LLAMA3.
        high_freq_factor: LLAMA3.
        attention_factor: YARN; multiplies cos and sin. None = from ``factor``.
        mscale: YARN; used only together with ``mscale_all_dim``.
        mscale_all_dim: YARN.
        beta_fast: YARN.
        beta_slow: YARN.
        truncate: YARN; whether the correction range is rounded to whole dimensions.
    """

    theta: float = DEFAULT_THETA
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


_NEEDS_FACTOR = (RopeKind.LINEAR, RopeKind.DYNAMIC, RopeKind.LLAMA3, RopeKind.YARN)


def _kind(params: Mapping[str, Any], violations: list[str]) -> RopeKind:
    name = params.get("rope_type", params.get("type")) or "default"
    try:
        return RopeKind(name)
    except ValueError:
        known = ", ".join(RopeKind)
        violations.append(f"config.json: rope type {name!r} is not supported; supported: {known}")
        return RopeKind.DEFAULT


def parse_rope(raw: Mapping[str, Any], violations: list[str]) -> RopeConfig:
    """Read the rotary embedding of a config.json; what cannot work is appended to ``violations``."""
    params: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = _kind(params, violations)
    theta = float(params.get("rope_theta") or raw.get("rope_theta") or DEFAULT_THETA)
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        violations.append(f"config.json: partial_rotary_factor is {partial}; only 1.0 is supported")
    trained = int(raw.get("max_position_embeddings") or 0)
    original = int(
        raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings") or trained
    )
    factor = params.get("factor")
    if factor is None and kind is RopeKind.YARN and original:
        factor = trained / original
    if factor is None and kind in _NEEDS_FACTOR:
        violations.append(f"config.json: rope type {kind.value!r} needs `factor`; add it to rope_parameters")
    if theta <= 0 or (factor is not None and factor <= 0):
        violations.append(f"config.json: rope_theta is {theta} and factor is {factor}; both must be above 0")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(1.0 if factor is None else factor),
        original_max_position=original,
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 4.0)),
        attention_factor=params.get("attention_factor"),
        mscale=float(params.get("mscale") or 0.0),
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
    )
