"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window only where the config switches it on."""

from __future__ import annotations

from kvtier_worker.model.family import Family

FAMILY = Family(name="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=True, window_needs_flag=True)
