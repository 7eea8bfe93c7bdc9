"""Mistral: Llama without biases, with an explicit head size and, in its first version, a sliding window.

Only full attention is computed; a window shorter than the model's length is refused by `ModelConfig.violations`.
"""

from __future__ import annotations

from kvtier_worker.model.family import Family

FAMILY = Family(name="mistral", architecture="MistralForCausalLM", default_window=4096)
