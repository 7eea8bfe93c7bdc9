"""Where every object of every registered domain lies in the pinned host arena, and how its bytes meet the device's.

One arena per worker: one contiguous range, registered with the store (and with the device runtime) once. Each
(domain, BlockType) owns a region of ``num_slots`` slots inside it; an object is contiguous within its slot. Addresses
and sizes only: who allocated the memory is the composition root's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier_worker.core.ids import BlockType, CacheRole, HostSlot
from kvtier_worker.core.layout import DomainLayout, ObjectLayout

REGION_ALIGNMENT = 4096
"""Regions start on pages, so that registering or locking one never touches its neighbour."""


class ArenaMemory(Protocol):
    """Where the arena's bytes come from."""

    def allocate(self, nbytes: int) -> int:
        """Address of that many zeroed bytes, valid until `free`. Called once.

        Raises:
            ConfigError: there is no such amount.
            StoreUnavailable: the store that should give it cannot.
        """

    def free(self) -> None:
        """Nothing refers to the memory any more."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Consecutive tensors of equal size in one layer, which one strided copy moves together (key and value, mostly).

    Attributes:
        offset: bytes from the start of a layer, on the host.
        count: number of tensors.
        nbytes: bytes of one tensor of one block.
    """

    offset: int
    count: int
    nbytes: int


def planes(layout: ObjectLayout) -> tuple[Plane, ...]:
    """Cut one layer of ``layout`` into as few planes as possible.

    On the host a layer is ``[tensor a][tensor b]…`` of one block. On the device the same bytes are
    ``[tensor a: every block][tensor b: every block]…`` per layer, so that attention sees a tensor's blocks side by
    side: plane p of layer l starts at ``(l * layer_bytes + p.offset) * num_blocks`` and is shaped
    ``[count, num_blocks, nbytes]``.
    """
    found: list[Plane] = []
    offset = 0
    for tensor in layout.tensors:
        if found and found[-1].nbytes == tensor.nbytes:
            found[-1] = Plane(found[-1].offset, found[-1].count + 1, tensor.nbytes)
        else:
            found.append(Plane(offset, 1, tensor.nbytes))
        offset += tensor.nbytes
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Region:
    """The slots of one (domain, BlockType).

    Attributes:
        offset: bytes from the start of the arena.
        num_slots: including padding slot 0.
    """

    role: CacheRole
    block_type: BlockType
    layout: ObjectLayout
    offset: int
    num_slots: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.layout.slot_bytes


@dataclass(frozen=True, slots=True)
class HostArena:
    """Regions laid out over memory at ``address``."""

    address: int
    regions: Mapping[tuple[CacheRole, BlockType], Region]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole range."""
        return arena_bytes(tuple(self.regions.values()))

    def region_address(self, role: CacheRole, block_type: BlockType) -> int:
        """Address of slot 0 of one region."""
        return self.address + self.regions[role, block_type].offset

    def slot_address(self, role: CacheRole, block_type: BlockType, slot: HostSlot) -> int:
        """Address of one object.

        Raises:
            IndexError: ``slot`` is padding or outside the region.
        """
        region = self.regions[role, block_type]
        if not 0 < slot < region.num_slots:
            msg = f"host slot {slot} is outside [1, {region.num_slots}) of {role} {block_type.name}"
            raise IndexError(msg)
        return self.address + region.offset + slot * region.layout.slot_bytes


def plan_regions(domains: Sequence[DomainLayout], num_slots: int) -> tuple[Region, ...]:
    """Lay out ``num_slots`` slots of every type of every domain, in registration order and type order."""
    regions: list[Region] = []
    offset = 0
    for domain in domains:
        for block_type in sorted(domain.objects):
            region = Region(domain.role, block_type, domain.objects[block_type], offset, num_slots)
            regions.append(region)
            offset = -(-(offset + region.nbytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    return tuple(regions)


def arena_bytes(regions: Sequence[Region]) -> int:
    """Bytes from the start of the first region to the end of the last."""
    return max((region.offset + region.nbytes for region in regions), default=0)


def bind_arena(address: int, regions: Sequence[Region]) -> HostArena:
    """The arena at ``address``."""
    return HostArena(address, {(region.role, region.block_type): region for region in regions})
