"""Rotary position embedding as one complex product.

A head's dimensions are stored as neighbouring pairs ``(2i, 2i+1)``, so that a pair is a complex number and a rotation
is one multiplication. Hugging Face checkpoints pair ``i`` with ``i + head_dim / 2`` instead; `pairwise_order` is
applied to the rows of the q and k projections when they are loaded. Dot products do not see the order.
"""

from __future__ import annotations

import math

import torch

from kvtier_worker.model.rope_config import RopeConfig, RopeKind


def pairwise_order(head_dim: int) -> torch.Tensor:
    """Index that turns a head's ``[first halves, second halves]`` into neighbouring pairs; shape ``[head_dim]``."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, float32 ``[head_dim / 2]``, and the factor on cos and sin.

    LLAMA3 is section "RoPE scaling" of the Llama 3.1 release; YARN is arXiv 2309.00071, equations 17, 23 and 25.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind is RopeKind.LINEAR:
        return plain / rope.factor, 1.0
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, plain), 1.0
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * keep + plain / rope.factor * (1.0 - keep)


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 1e-3
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * stretch + plain * (1.0 - stretch)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rotation_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Rotations of every position: complex64 ``[num_positions, head_dim / 2]``."""
    inverse, factor = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return torch.polar(torch.full_like(angles, factor), angles)


def rotate(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate ``heads``, ``[tokens, heads, head_dim]``, in place; ``rotations`` is ``[tokens, 1, head_dim / 2]``."""
    pairs = heads.view(*heads.shape[:-1], heads.shape[-1] // 2, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotations))
