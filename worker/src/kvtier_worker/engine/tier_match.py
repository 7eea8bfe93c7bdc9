"""What the tiers hold of one request at one moment, and where each block of it would come from. Records only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier_worker.core.ids import BlockHash, BlockId, HostSlot
from kvtier_worker.core.prefix import PrefixMatch


@dataclass(frozen=True, slots=True)
class TierMatch:
    """What the tiers hold of a request right now.

    Attributes:
        prefix: the blocks to take and from which tier; may be trimmed before `TieredBlockManager.allocate`.
        hashes: of every block that could be taken.
        device: device block per hash, None = hole.
        host: host slot per hash, None = hole.
    """

    prefix: PrefixMatch
    hashes: Sequence[BlockHash]
    device: Sequence[int | None]
    host: Sequence[int | None]


def sources(match: TierMatch, count: int) -> Iterator[tuple[BlockId | None, HostSlot]]:
    """For each of the first ``count`` blocks its device block, or None and the host slot to restore it from."""
    for index in range(count):
        block = match.device[index]
        slot = match.host[index] if block is None else None
        assert block is not None or slot is not None
        yield None if block is None else BlockId(block), HostSlot(slot or 0)


def parent_of(hashes: Sequence[BlockHash], index: int) -> BlockHash | None:
    """Hash of the block before ``index``; None for block 0."""
    return hashes[index - 1] if index else None
