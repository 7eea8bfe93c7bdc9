"""The index arithmetic of the CUDA copies, on CPU tensors: what the kernels would be told to move."""

from __future__ import annotations

import pytest
import torch
from kvtier_worker.adapters.cuda_copy import cuda_objects
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.core.ids import BlockId, BlockType, CacheRole, DType, HostSlot
from kvtier_worker.core.layout import ObjectLayout, layer_ranges
from kvtier_worker.engine.arena import arena_bytes, bind_arena, plan_regions
from kvtier_worker.testing.blocks import (
    domain,
    indexed_objects,
    kv_objects,
    random_block,
    read_block,
    write_block,
    write_slot,
)
from kvtier_worker.testing.copy import BytesArenaMemory

LAYOUTS = [
    kv_objects(),
    kv_objects(dtype=DType.BFLOAT16, heads=3, head_dim=5),
    kv_objects(dtype=DType.UINT8, block_size=3, heads=1, head_dim=5),
    indexed_objects(),
]


@pytest.mark.parametrize("objects", LAYOUTS)
def test_staged_layers_scatter_to_and_gather_from_where_the_cpu_path_puts_them(objects: ObjectLayout) -> None:
    layout = domain(objects)
    memory = BytesArenaMemory()
    regions = plan_regions([layout], 4)
    arena = bind_arena(memory.allocate(arena_bytes(regions)), regions)
    cache = TorchDeviceCache(layout, 5, torch.device("cpu"))
    both = cuda_objects(arena, cache, BlockType.KV)
    data = random_block(objects, 1)
    write_slot(arena, 2, data, CacheRole.TARGET)
    for start, stop in layer_ranges(objects.num_layers, 3):
        staged = both.host_layers(HostSlot(2), start, stop).clone()
        for device, part in both.pieces(staged, BlockId(3), start, stop):
            assert device.shape == part.shape
            device.copy_(part)
    assert read_block(cache, 3) == data
    other = random_block(objects, 2)
    write_block(cache, 4, other)
    staged = torch.zeros(objects.payload_bytes, dtype=torch.uint8)
    for device, part in both.pieces(staged, BlockId(4), 0, objects.num_layers):
        part.copy_(device)
    assert bytes(staged.numpy()) == other


def test_attention_sees_the_blocks_of_a_layers_keys_side_by_side() -> None:
    cache = TorchDeviceCache(domain(kv_objects(num_layers=3)), 5, torch.device("cpu"))
    tensor = cache.tensor(BlockType.KV)
    assert tensor.shape == (3, 2, 5, 4, 2, 3)
    assert tensor.is_contiguous()
    tensor[1, 1, 2].fill_(7.0)
    layer = 4 * 2 * 3 * 4
    expected = bytes(3 * layer) + torch.full((layer // 4,), 7.0).numpy().tobytes() + bytes(2 * layer)
    assert read_block(cache, 2) == expected


def test_unlike_tensors_have_no_common_view() -> None:
    with pytest.raises(ValueError, match="differ"):
        TorchDeviceCache(domain(indexed_objects()), 3, torch.device("cpu")).tensor(BlockType.KV)


def test_a_fresh_cpu_cache_is_zero_and_not_resident() -> None:
    layout = domain(kv_objects(num_layers=8, block_size=128, heads=8, head_dim=64))
    before = resident()
    cache = TorchDeviceCache(layout, 512, torch.device("cpu"))
    assert float(cache.tensor(BlockType.KV)[3, 1, 77].sum()) == 0.0
    assert cache.flat(BlockType.KV).numel() == 2 << 30
    assert resident() - before < 64 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - one number, no path to compose
        return int(file.read().split()[1]) * 4096
