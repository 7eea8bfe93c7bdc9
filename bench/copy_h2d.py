"""Copies between host arena and device cache against memcpy of the same bytes, and what a forward sees of a restore.

SmolLM2's layout in float32, blocks of 128 tokens, 24 blocks: a prompt of 3,072 tokens. Every pair of numbers is
measured alternately in one run, the median counts. On CPU; one copy thread, one compute thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from kvtier_worker.adapters.cpu_copy import CpuCopyEngine
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.core.ids import BatchId, BlockId, BlockType, DType, HostSlot
from kvtier_worker.core.plans import RestoreItem, RestorePlan
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.ports import CopyStream
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.machine.memory import PageMemory, allocate_pages
from kvtier_worker.testing.blocks import domain, job, kv_objects
from report import Result, compare, write_report

NUM_LAYERS = 30
LAYOUT = domain(kv_objects(NUM_LAYERS, block_size=128, heads=3, head_dim=64, dtype=DType.FLOAT32))
OBJECTS = LAYOUT.objects[BlockType.KV]
SLOTS, BLOCKS, MOVED = 40, 64, 24
PAIRS = [(slot, slot * 11 % (BLOCKS - 1) + 1) for slot in range(1, MOVED + 1)]
LAYER_COPIES = 4


class Memory:
    """Arena memory that the bench can fill."""

    def __init__(self) -> None:
        self.pages: PageMemory | None = None

    def allocate(self, nbytes: int) -> int:
        self.pages = allocate_pages(nbytes)
        return self.pages.address

    def free(self) -> None:
        self.pages = None


class Setup:
    """One transfer, its cache and its engine."""

    def __init__(self) -> None:
        self.cache = TorchDeviceCache(LAYOUT, BLOCKS, torch.device("cpu"))
        self.cache.flat(BlockType.KV).fill_(1)
        self.transfer = HierarchyKVCacheTransfer(
            TransferOptions("bench", SLOTS, layer_copies=LAYER_COPIES), copy_engine=self.build, memory=Memory()
        )
        self.transfer.register_cache(self.cache)
        self.transfer.finalize_registration()
        self._batch = 0

    def build(self, arena: HostArena, _: object) -> CpuCopyEngine:
        self.engine = CpuCopyEngine(arena, [self.cache])
        return self.engine

    def restore(self) -> BatchId:
        self._batch += 1
        items = tuple(RestoreItem(HostSlot(slot), BlockId(block)) for slot, block in PAIRS)
        self.transfer.restore(RestorePlan(BatchId(self._batch), items))
        return BatchId(self._batch)

    def forward(self, batch: BatchId, layer_work: Callable[[], None]) -> float:
        """Seconds stalled."""
        gate = self.transfer.take(batch, expected=True)
        assert gate is not None
        for layer in range(NUM_LAYERS):
            gate.wait(layer)
            layer_work()
        gate.finish()
        return gate.stall_s

    def writeback(self, stream: CopyStream) -> None:
        stream.writeback(job(PAIRS))
        stream.synchronize()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def alternate(count: int, *works: Callable[[], object]) -> list[float]:
    """Median seconds of each, measured in turns after one turn to warm up."""
    for work in works:
        work()
    turns = [[timed(work) for work in works] for _ in range(count)]
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args(argv).repeats
    torch.set_num_threads(1)
    setup = Setup()
    nbytes = OBJECTS.payload_bytes * MOVED
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    stream = setup.engine.stream()

    def memcpy() -> None:
        np.copyto(target, source)

    def restore_all() -> None:
        setup.forward(setup.restore(), lambda: None)

    memcpy_s, restore_s, writeback_s = alternate(repeats, memcpy, restore_all, lambda: setup.writeback(stream))
    left = torch.rand(96, 576)
    right = torch.rand(576, 576)
    layer_s = alternate(repeats, lambda: left @ right)[0]
    products = max(1, round(2 * restore_s / NUM_LAYERS / layer_s))

    def layer_work() -> None:
        for _ in range(products):
            left @ right

    stalls = [setup.forward(setup.restore(), layer_work) for _ in range(repeats)]
    speed = nbytes / 1e9
    results: list[Result] = [
        compare("H2D GB/s, 24 blocks of 5.9 MB", speed / restore_s, speed / memcpy_s, at_least=0.9),
        compare("D2H GB/s with checksums, same blocks", speed / writeback_s, speed / memcpy_s),
        compare(
            "visible stall ms of a restore under a forward twice as long; reference: the copy",
            statistics.median(stalls) * 1e3,
            restore_s * 1e3,
            at_most=0.1,
        ),
    ]
    write_report("copy_h2d", results, "python bench/copy_h2d.py")
    setup.transfer.shutdown()


if __name__ == "__main__":
    main()
