"""How the bytes of one physical object are laid out, and how its layers are cut into ranges.

An object is one (block, cache domain, BlockType, TP rank), or one for all ranks under MLA. In host memory and in the
store it is one contiguous byte range:

    [layer 0: role a, role b, …][layer 1: …] … [layer L-1: …][trailer]

so a get or a put is one pointer and one length, and restoring a layer range is one strided copy. The trailer holds
the integrity checksum (`TRAILER_BYTES`). Pure: sizes and offsets only, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_worker.core.ids import BlockType, CacheRole, DType, TensorRole

TRAILER_BYTES = 16
"""xxh3-64 of the payload, then xxh3-64 of the key seeded with the payload's length; 8 bytes each, little endian.

In host memory, before the object leaves under a key, the length alone stands in the key's place.
"""

SLOT_ALIGNMENT = 64
"""Host slots start on cache lines."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a block in one layer.

    Attributes:
        role: what it is.
        dtype: element type.
        shape: elements of ONE block in ONE layer, e.g. ``(block_size, kv_heads, head_dim)``.
    """

    role: TensorRole
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one block in one layer."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """All layers of one BlockType of one domain on one rank.

    ``tensors`` is in role order; every layer has the same tensors.
    """

    num_layers: int
    tensors: tuple[TensorSpec, ...]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block, all roles."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the block without its trailer."""
        return self.num_layers * self.layer_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of one store object: payload and trailer."""
        return self.payload_bytes + TRAILER_BYTES

    @property
    def slot_bytes(self) -> int:
        """Distance between two host slots: the object rounded up to `SLOT_ALIGNMENT`."""
        return -(-self.object_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def layer_span(self, start: int, stop: int) -> tuple[int, int]:
        """Byte range ``[first, last)`` of layers ``[start, stop)`` inside the object."""
        return start * self.layer_bytes, stop * self.layer_bytes


@dataclass(frozen=True, slots=True)
class DomainLayout:
    """One cache domain as registered: the target model, or a draft.

    Attributes:
        role: target or draft.
        key_component: ``main`` or ``spec_draft::…`` (K2); part of every store key of this domain.
        objects: one layout per BlockType this domain owns.
    """

    role: CacheRole
    key_component: str
    objects: Mapping[BlockType, ObjectLayout]


def layer_ranges(num_layers: int, num_copies: int) -> tuple[tuple[int, int], ...]:
    """Cut ``num_layers`` into half-open ranges, about ``num_copies`` of them (``layers_wise_copy_batchs``).

    ``num_copies`` 0 means one range. A range has ``max(num_layers // num_copies, 1)`` layers and the last may be
    short, so integer division can give more ranges than asked for: (3, 2) gives 3 ranges, (61, 4) gives 5.
    """
    per_range = num_layers if num_copies <= 0 else max(num_layers // num_copies, 1)
    return tuple((start, min(start + per_range, num_layers)) for start in range(0, num_layers, per_range))
