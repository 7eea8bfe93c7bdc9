"""Llama and the models that share its architecture (SmolLM2, TinyLlama, Llama 3)."""

from __future__ import annotations

from kvtier_worker.model.family import Family

FAMILY = Family(name="llama", architecture="LlamaForCausalLM", qkv_bias=None, output_bias=None, mlp_bias=True)
