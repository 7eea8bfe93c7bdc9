"""How much of a prompt the tiers cover: runs over holes, and where computing starts. Pure arithmetic.

A tier's answer about a prompt is one entry per full block, in token order: the slot, or None for a *hole*. Tiers
complement each other block by block, so the usable run ends at the first block that no tier has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier_worker.core.ids import Tier


def full_blocks(num_tokens: int, block_size: int) -> int:
    """Complete blocks of a sequence; a partial tail is never hashed, cached or matched."""
    return num_tokens // block_size


def run_length(present: Iterable[bool]) -> int:
    """Length of the run of True from the start."""
    length = 0
    for here in present:
        if not here:
            break
        length += 1
    return length


def holes(slots: Sequence[int | None]) -> list[int]:
    """Indices of the blocks that are missing, in token order, so that taking the first few helps the most."""
    return [index for index, slot in enumerate(slots) if slot is None]


def usable_run(*tiers: Sequence[int | None]) -> int:
    """Blocks from the start that at least one tier has. Tiers may answer for different numbers of blocks."""
    length = 0
    longest = max(map(len, tiers), default=0)
    while length < longest and any(length < len(slots) and slots[length] is not None for slots in tiers):
        length += 1
    return length


def restorable_blocks(reach_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Cached blocks that a request may use: at least one prompt token is always computed.

    ``align_down(min(reach * block_size, prompt_tokens - 1), block_size)`` in blocks: a fully cached prompt whose
    length is a multiple of the block size gives up its last block.
    """
    if prompt_tokens < 1:
        msg = f"a prompt has at least one token, got {prompt_tokens}"
        raise ValueError(msg)
    return min(reach_blocks, (prompt_tokens - 1) // block_size)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a request takes from the tiers, and where its computing starts.

    Attributes:
        tiers: for each block of the cached prefix the tier it comes from; the device is preferred.
        block_size: tokens in a block.
    """

    tiers: tuple[Tier, ...]
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Position of the first computed token, a multiple of the block size."""
        return len(self.tiers) * self.block_size

    @property
    def num_restores(self) -> int:
        """Blocks to copy from host to device."""
        return sum(tier is Tier.HOST for tier in self.tiers)

    def trim(self, max_restores: int) -> PrefixMatch:
        """The longest prefix of this match with at most ``max_restores`` blocks to copy."""
        left = max_restores
        for index, tier in enumerate(self.tiers):
            if tier is Tier.HOST:
                if left <= 0:
                    return PrefixMatch(self.tiers[:index], self.block_size)
                left -= 1
        return self


def match_tiers(
    device: Sequence[int | None],
    host: Sequence[int | None],
    *,
    prompt_tokens: int,
    block_size: int,
) -> PrefixMatch:
    """Merge the device's and the host's answers block by block into the prefix a request may use.

    Args:
        device: device block of each full block, None = hole.
        host: host slot of each full block, None = hole.
        prompt_tokens: tokens to have before the first sampled one.
        block_size: tokens in a block.
    """
    count = restorable_blocks(usable_run(device, host), prompt_tokens, block_size)
    on_device = (index < len(device) and device[index] is not None for index in range(count))
    return PrefixMatch(tuple(Tier.DEVICE if here else Tier.HOST for here in on_device), block_size)
