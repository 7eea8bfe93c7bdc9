from __future__ import annotations

import math

import torch
from kvtier_worker.model.rope import inverse_frequencies, pairwise_order, rotate, rotation_table
from kvtier_worker.model.rope_config import RopeConfig, RopeKind


def test_a_rotation_turns_every_pair_by_position_times_frequency() -> None:
    head = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0))
    turned = head.clone()
    rotate(turned, rotation_table(RopeConfig(theta=100.0), 8, 6)[5:6, None])
    for pair in range(4):
        angle = 5 * 100.0 ** (-2 * pair / 8)
        x, y = head[0, :, 2 * pair], head[0, :, 2 * pair + 1]
        expected = torch.stack(
            [x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)], dim=-1
        )
        torch.testing.assert_close(turned[0, :, 2 * pair : 2 * pair + 2], expected)


def test_pairwise_order_brings_the_halves_of_a_head_together() -> None:
    assert pairwise_order(6).tolist() == [0, 3, 1, 4, 2, 5]


def test_narrow_types_are_rotated_in_float32() -> None:
    rotations = rotation_table(RopeConfig(), 16, 300)[299:, None]
    wide = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow, exact = wide.clone(), wide.float()
    rotate(narrow, rotations)
    rotate(exact, rotations)
    assert torch.equal(narrow, exact.bfloat16())


def test_linear_scaling_slows_every_pair() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    slowed, factor = inverse_frequencies(RopeConfig(kind=RopeKind.LINEAR, factor=4.0), 8)
    torch.testing.assert_close(slowed * 4.0, plain)
    assert factor == 1.0


def test_dynamic_scaling_is_plain_within_the_trained_length() -> None:
    plain, _ = inverse_frequencies(RopeConfig(), 8)
    assert torch.equal(inverse_frequencies(RopeConfig(kind=RopeKind.DYNAMIC, factor=2.0), 8)[0], plain)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    rope = RopeConfig(theta=1e4, kind=RopeKind.YARN, factor=4.0, original_max_position=2048)
    plain, _ = inverse_frequencies(RopeConfig(theta=1e4), 64)
    scaled, factor = inverse_frequencies(rope, 64)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 4.0)
    assert math.isclose(factor, 0.1 * math.log(4.0) + 1.0)
    assert (
        inverse_frequencies(
            RopeConfig(kind=RopeKind.YARN, factor=2.0, original_max_position=64, attention_factor=1.5), 8
        )[1]
        == 1.5
    )
