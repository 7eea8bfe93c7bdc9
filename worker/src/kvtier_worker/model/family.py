"""What one family of decoders does differently from its siblings, as a record that the shared layers read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one family of decoders apart from its siblings.

    Attributes:
        name: ``model_type`` of config.json.
        architecture: the causal language model's class name in config.json.
        qkv_bias: the q, k and v projections have a bias; None = as ``attention_bias`` says.
        output_bias: the attention's output projection has a bias; None = as ``attention_bias`` says.
        mlp_bias: whether the config's ``mlp_bias`` is looked at; without it there is none.
        qk_norm: q and k are RMS-normalised per head before rotation.
        window_needs_flag: ``sliding_window`` counts only with ``use_sliding_window``.
        default_window: ``sliding_window`` of a config that does not mention it.
        default_head_dim: head size when the config names none; 0 = hidden size divided by heads.
    """

    name: str
    architecture: str
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window_needs_flag: bool = False
    default_window: int | None = None
    default_head_dim: int = 0
