"""Layouts and block contents for tests of copies: every byte of a block tells whose it is."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

from kvtier_worker.adapters.cpu_copy import AddressableCache
from kvtier_worker.core.ids import BlockHash, BlockId, BlockType, CacheRole, DType, HostSlot, TensorRole
from kvtier_worker.core.layout import DomainLayout, ObjectLayout, TensorSpec
from kvtier_worker.engine.arena import HostArena, planes
from kvtier_worker.engine.ports import CopyJob


def kv_objects(
    num_layers: int = 4, block_size: int = 4, heads: int = 2, head_dim: int = 3, dtype: DType = DType.FLOAT32
) -> ObjectLayout:
    """Key and value of equal shape."""
    shape = (block_size, heads, head_dim)
    roles = (TensorRole.KEY, TensorRole.VALUE)
    return ObjectLayout(num_layers, tuple(TensorSpec(role, dtype, shape) for role in roles))


def indexed_objects(num_layers: int = 3) -> ObjectLayout:
    """Key and value, a packed index and its scale: tensors of three sizes."""
    return ObjectLayout(
        num_layers,
        (
            TensorSpec(TensorRole.KEY, DType.BFLOAT16, (4, 2, 4)),
            TensorSpec(TensorRole.VALUE, DType.BFLOAT16, (4, 2, 4)),
            TensorSpec(TensorRole.INDEX, DType.UINT8, (4, 8)),
            TensorSpec(TensorRole.INDEX_SCALE, DType.FLOAT32, (4,)),
        ),
    )


def domain(
    objects: ObjectLayout | dict[BlockType, ObjectLayout] | None = None,
    role: CacheRole = CacheRole.TARGET,
    key_component: str = "main",
) -> DomainLayout:
    """A domain with KV blocks, or with the types given."""
    if not isinstance(objects, dict):
        objects = {BlockType.KV: objects or kv_objects()}
    return DomainLayout(role, key_component, objects)


def job(
    pairs: Sequence[tuple[int, int]], role: CacheRole = CacheRole.TARGET, block_type: BlockType = BlockType.KV
) -> CopyJob:
    """A copy job of (host slot, device block) pairs."""
    return CopyJob(role, block_type, tuple((HostSlot(slot), BlockId(block)) for slot, block in pairs))


def block_hash(number: int) -> BlockHash:
    """A distinct hash."""
    return BlockHash(number.to_bytes(16, "big"))


def read_block(cache: AddressableCache, block: int, block_type: BlockType = BlockType.KV) -> bytes:
    """One device block in the order of host bytes, gathered byte range by byte range."""
    return b"".join(ctypes.string_at(address, size) for address, size in _ranges(cache, block, block_type))


def write_block(cache: AddressableCache, block: int, content: bytes, block_type: BlockType = BlockType.KV) -> None:
    """Scatter host-ordered bytes into one device block."""
    offset = 0
    for address, size in _ranges(cache, block, block_type):
        ctypes.memmove(address, content[offset : offset + size], size)
        offset += size
    assert offset == len(content)


def random_block(layout: ObjectLayout, seed: int) -> bytes:
    """Content of one block that no other seed gives."""
    return random.Random(seed).randbytes(layout.payload_bytes)  # noqa: S311 - reproducible, not secret


def read_slot(arena: HostArena, slot: int, role: CacheRole, block_type: BlockType = BlockType.KV) -> bytes:
    """Payload of one host slot."""
    layout = arena.regions[role, block_type].layout
    return ctypes.string_at(arena.slot_address(role, block_type, HostSlot(slot)), layout.payload_bytes)


def write_slot(
    arena: HostArena, slot: int, content: bytes, role: CacheRole, block_type: BlockType = BlockType.KV
) -> None:
    """Fill the payload of one host slot."""
    ctypes.memmove(arena.slot_address(role, block_type, HostSlot(slot)), content, len(content))


def _ranges(cache: AddressableCache, block: int, block_type: BlockType) -> list[tuple[int, int]]:
    """(address, size) of every piece of a device block, from the definition of the device layout and nothing else."""
    layout, blocks, base = cache.layout.objects[block_type], cache.num_blocks, cache.address(block_type)
    return [
        (
            base + (layer * layout.layer_bytes + plane.offset + index * plane.nbytes) * blocks + block * plane.nbytes,
            plane.nbytes,
        )
        for layer in range(layout.num_layers)
        for plane in planes(layout)
        for index in range(plane.count)
    ]
