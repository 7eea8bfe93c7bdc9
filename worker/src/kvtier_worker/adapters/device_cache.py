"""The device cache in torch: one allocation per (domain, BlockType), shared by copy engine and attention.

Layout of the allocation: ``[layer][tensor][block][one block's elements]``, as `kvtier_worker.engine.arena.planes`
describes. For key and value that is a tensor ``[layers, 2, blocks, kv_heads, block_size, head_dim]``, so attention
sees the blocks of a layer's keys side by side.
"""

from __future__ import annotations

import mmap

import torch

from kvtier_worker.core.ids import BlockType, DType
from kvtier_worker.core.layout import DomainLayout, ObjectLayout
from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.memory import Span

TORCH_DTYPES = {
    DType.UINT8: torch.uint8,
    DType.INT8: torch.int8,
    DType.INT32: torch.int32,
    DType.FLOAT16: torch.float16,
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
}


class TorchDeviceCache:
    """The blocks of one cache domain on one device. Zeroed; on CPU memory becomes resident as it is used, or populated.

    Args:
        layout: of one block.
        num_blocks: blocks including padding block 0.
        device: where.

    Raises:
        ConfigError: the device cannot hold it.
    """

    def __init__(self, layout: DomainLayout, num_blocks: int, device: torch.device) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._flat = {
            block_type: _allocate(objects.payload_bytes * num_blocks, device)
            for block_type, objects in layout.objects.items()
        }

    @property
    def layout(self) -> DomainLayout:
        """See `DeviceCache`."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """See `DeviceCache`."""
        return self._num_blocks

    def flat(self, block_type: BlockType) -> torch.Tensor:
        """All bytes of one type: uint8, one dimension."""
        return self._flat[block_type]

    def address(self, block_type: BlockType) -> int:
        """Address of `flat`; for a CPU cache an address of this process."""
        return self._flat[block_type].data_ptr()

    def spans(self) -> tuple[Span, ...]:
        """Each tensor of each layer of a CPU cache, block 0 first."""
        found: list[Span] = []
        for block_type, objects in self._layout.objects.items():
            start = self.address(block_type)
            for tensor in objects.tensors * objects.num_layers:
                found.append(Span(start, tensor.nbytes * self._num_blocks))
                start += tensor.nbytes * self._num_blocks
        return tuple(found)

    def tensor(self, block_type: BlockType = BlockType.KV) -> torch.Tensor:
        """``[layers, tensors, blocks, *shape of one block]``, for a type whose tensors are all alike.

        Raises:
            ValueError: they are not alike; there is no one tensor of them.
        """
        objects = self._layout.objects[block_type]
        spec = _common_spec(objects, block_type)
        shape = (objects.num_layers, len(objects.tensors), self._num_blocks, *spec[1])
        return self._flat[block_type].view(TORCH_DTYPES[spec[0]]).view(shape)


def _common_spec(objects: ObjectLayout, block_type: BlockType) -> tuple[DType, tuple[int, ...]]:
    specs = {(tensor.dtype, tensor.shape) for tensor in objects.tensors}
    if len(specs) != 1:
        msg = f"the tensors of {block_type.name} differ in shape or type: {specs}"
        raise ValueError(msg)
    return specs.pop()


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        if device.type != "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # Fresh pages: zero without being touched, unlike what malloc may hand out again.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    except (OSError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            [f"--max_cache_size: {device} cannot hold a cache of {nbytes} bytes ({error}); set a smaller one"]
        ) from error
