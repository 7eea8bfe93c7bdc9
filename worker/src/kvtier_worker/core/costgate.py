"""Restore a cached prefix, compute it, or restore its head only? Decided from measured rates. Pure.

Per block of ``block_size`` tokens and ``B`` bytes:

    restoring costs   B / bandwidth           seconds of copying, plus a fixed latency per restore
    computing costs   block_size / prefill    seconds of the model

so restoring a block pays iff ``bandwidth / (B / block_size) > prefill rate``: the tokens a second that a copy delivers
against the tokens a second that the model makes. But layers compute while later layers are copied, so a slower copy
still pays as far as it hides. With the first ``k`` of ``n`` blocks restored, copy(k) = latency + k * B / bandwidth,
compute(k) = ((n - k) * block_size + tail) / prefill, where the tail is computed whatever happens, and L layers:

    time(k) = max(copy, compute) + min(copy, compute) / L

because only one layer of the shorter of the two is visible. The gate takes the ``k`` with the least time: none, all,
or a part. With the gate off everything is restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """Exponentially weighted rate: amount and time are faded alike, so a long sample weighs more than a short one.

    Attributes:
        amount: faded sum of what was done: bytes, or tokens.
        seconds: faded sum of the time it took.
        keep: what a sample leaves of the past, in [0, 1).
    """

    amount: float = 0.0
    seconds: float = 0.0
    keep: float = 0.9

    def observe(self, amount: float, seconds: float) -> RateEstimate:
        """The estimate after one more sample. A sample without amount or time says nothing."""
        if amount <= 0 or seconds <= 0:
            return self
        return RateEstimate(self.keep * self.amount + amount, self.keep * self.seconds + seconds, self.keep)

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self.seconds > 0

    @property
    def per_second(self) -> float:
        """The rate. Raises ValueError while it is unknown."""
        if not self.known:
            raise ValueError("no rate without a sample")
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the gate needs to know of the machine.

    Attributes:
        restore: bytes a second of host -> device, on the slowest rank.
        prefill: tokens a second of the model.
        latency_s: fixed cost of having any restore at all: registering, first copy.
        num_layers: layers of the model.
    """

    restore: RateEstimate = RateEstimate()
    prefill: RateEstimate = RateEstimate()
    latency_s: float = 0.0
    num_layers: int = 1


def choose_restore(
    num_blocks: int,
    *,
    bytes_per_block: int,
    block_size: int,
    tail_tokens: int,
    costs: CostModel,
) -> int:
    """How many of the ``num_blocks`` restorable blocks to restore, from the first on; the rest is computed.

    Args:
        num_blocks: blocks the host could give, behind what the device has.
        bytes_per_block: bytes of one block on one rank, all domains.
        block_size: tokens in a block.
        tail_tokens: tokens to compute whatever is decided, at least 1.
        costs: measured rates. While either is unknown everything is restored: that is how it gets known.
    """
    if num_blocks == 0 or not (costs.restore.known and costs.prefill.known):
        return num_blocks
    copy_s = bytes_per_block / costs.restore.per_second
    compute_s = block_size / costs.prefill.per_second
    tail_s = tail_tokens / costs.prefill.per_second

    def seconds(restored: int) -> float:
        compute = (num_blocks - restored) * compute_s + tail_s
        if not restored:
            return compute
        copy = costs.latency_s + restored * copy_s
        return max(copy, compute) + min(copy, compute) / costs.num_layers

    # Linear on both sides of the point where copy and compute are equal: the least is beside it, or at an end.
    crossing = math.floor((num_blocks * compute_s + tail_s - costs.latency_s) / (copy_s + compute_s))
    candidates = {0, num_blocks} | {min(max(crossing + step, 0), num_blocks) for step in (0, 1)}
    return min(candidates, key=lambda restored: (seconds(restored), -restored))
