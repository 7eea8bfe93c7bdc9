"""Qwen3: a head size of its own, and q and k normalised per head before rotation."""

from __future__ import annotations

from kvtier_worker.model.family import Family

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    qkv_bias=None,
    output_bias=None,
    qk_norm=True,
    window_needs_flag=True,
    default_head_dim=128,
)
