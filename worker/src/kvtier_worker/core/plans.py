"""The plans: what is to be copied between tiers, decided before anything moves. Records only.

word       direction                        xLLM's name
prefetch   store  -> host                   G2H
restore    host   -> device                 H2D
writeback  device -> host -> store          D2H2G
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_worker.core.ids import BatchId, BlockHash, BlockId, BlockType, HostSlot, JobId


@dataclass(frozen=True, slots=True)
class PrefetchItem:
    """One logical block to read from the store into a reserved host slot, on every rank."""

    host_slot: HostSlot
    block_hash: BlockHash
    block_type: BlockType = BlockType.KV


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """The holes of one request, in token order, so that stopping early leaves a usable prefix."""

    job_id: JobId
    items: tuple[PrefetchItem, ...]


@dataclass(frozen=True, slots=True)
class RestoreItem:
    """One logical block to copy from host to device, in every domain of its type."""

    host_slot: HostSlot
    device_block: BlockId
    block_type: BlockType = BlockType.KV


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All restores of one forward step. Destinations are distinct; sources may repeat."""

    batch_id: BatchId
    items: tuple[RestoreItem, ...]


@dataclass(frozen=True, slots=True)
class WritebackItem:
    """One complete device block to copy to its reserved host slot and then to the store."""

    device_block: BlockId
    host_slot: HostSlot
    block_hash: BlockHash
    block_type: BlockType = BlockType.KV


@dataclass(frozen=True, slots=True)
class WritebackPlan:
    """One write-back job. Both ends stay leased by the job until every rank reported."""

    job_id: JobId
    items: tuple[WritebackItem, ...]
