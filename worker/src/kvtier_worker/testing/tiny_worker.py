"""A worker process without torch: a model that is arithmetic over its cache, the real copies, transfer, loop and link.

Its tokens depend on every cached token at its position, so a block that is missing, stale or somebody else's changes
them. Run as ``python -m kvtier_worker.testing.tiny_worker``; ``model`` of its settings is a list of tricks, see `main`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

import numpy as np

from kvtier_worker.adapters.cpu_copy import CpuCopyEngine
from kvtier_worker.adapters.zmq_link import ZmqWorkerLink
from kvtier_worker.core.ids import BlockType, DType, Rank
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.messages import (
    PROTOCOL_VERSION,
    SequenceStep,
    TokenOutput,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from kvtier_worker.engine.ports import KVCacheStore, LayerGate
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.worker_runtime import RuntimeOptions, WorkerRuntime
from kvtier_worker.engine.worker_start import WorkerStart, decode_start
from kvtier_worker.testing.blocks import domain, kv_objects
from kvtier_worker.testing.copy import BytesArenaMemory, BytesDeviceCache
from kvtier_worker.testing.store import MemoryStore

VOCAB = 50_021
NUM_LAYERS = 4
NUM_BLOCKS = 32
NUM_SLOTS = 40
POISON_TOKEN = 49_999
"""A model that meets it raises."""


def tiny_layout(block_size: int) -> DomainLayout:
    """One float per token, tensor and layer."""
    return domain(kv_objects(NUM_LAYERS, block_size, heads=1, head_dim=1, dtype=DType.FLOAT32))


def next_token(tokens: Sequence[int]) -> int:
    """What `TinyModel` answers to a whole sequence: the oracle of tests."""
    return sum((position + 1) * token for position, token in enumerate(tokens)) % VOCAB


class TinyModel:
    """Writes every token into every layer's keys and values; answers from the last layer's. See `ModelRunner`."""

    def __init__(self, cache: BytesDeviceCache, block_size: int, rank: int = 0) -> None:
        memory = np.frombuffer(cache.view(BlockType.KV), dtype=np.float32)
        self._cells = memory.reshape(NUM_LAYERS, 2, cache.num_blocks, block_size)
        self._layout = cache.layout
        self._size = block_size
        self._rank = rank

    @property
    def layout(self) -> DomainLayout:
        """See `ModelRunner`."""
        return self._layout

    def forward(self, sequences: Sequence[SequenceStep], gate: LayerGate | None) -> Sequence[TokenOutput]:
        """See `ModelRunner`."""
        for layer in range(NUM_LAYERS):
            if gate is not None:
                gate.wait(layer)
            for step in sequences:
                self._write(layer, step)
        outputs = [TokenOutput(step.request_id, self._answer(step)) for step in sequences if step.sample]
        return outputs if self._rank == 0 else []

    def _write(self, layer: int, step: SequenceStep) -> None:
        if POISON_TOKEN in step.token_ids:
            msg = "a token that this model cannot bear"
            raise RuntimeError(msg)
        for offset, token in enumerate(step.token_ids):
            block, inside = divmod(step.start + offset, self._size)
            self._cells[layer, :, step.block_table[block], inside] = token

    def _answer(self, step: SequenceStep) -> int:
        length = step.start + len(step.token_ids)
        read = [
            {int(self._cells[layer, kind, step.block_table[at // self._size], at % self._size])}
            for at in range(length)
            for layer in range(NUM_LAYERS)
            for kind in range(2)
        ]
        tokens = [set.union(*read[at * NUM_LAYERS * 2 : (at + 1) * NUM_LAYERS * 2]) for at in range(length)]
        return next_token([sum(token) for token in tokens])  # layers that disagree make another sum


def tiny_transfer(
    cache: BytesDeviceCache, store: KVCacheStore | None, *, tp_size: int = 1, rank: int = 0
) -> HierarchyKVCacheTransfer:
    """A finalised transfer over the real CPU copy engine."""
    transfer = HierarchyKVCacheTransfer(
        TransferOptions("tiny", NUM_SLOTS, tp_size=tp_size, tp_rank=Rank(rank), layer_copies=2),
        copy_engine=lambda arena, _: CpuCopyEngine(arena, [cache]),
        memory=BytesArenaMemory(),
        store=store,
    )
    transfer.register_cache(cache)
    transfer.finalize_registration()
    return transfer


def main() -> int:
    """Serve one engine.

    Tricks in ``settings.model``, comma separated: ``refuse`` (settings), ``crash`` (before ready), ``old-protocol``,
    ``deaf`` (ignores Shutdown).
    """
    start = decode_start(sys.stdin.buffer.readline())
    tricks = start.settings.model.split(",")
    link = ZmqWorkerLink(start.requests, start.answers)
    threading.Thread(target=_exit_with_engine, daemon=True).start()
    if "crash" in tricks:
        return 7
    if "refuse" in tricks:
        link.send(WorkerFailed(start.rank, "refused", ["--model=refuse: not this one; use another"]))
        link.destroy()
        return 2
    link.send(WorkerProgress(start.rank, "loading arithmetic"))
    _serve(start, link, tricks)
    if "deaf" in tricks:
        threading.Event().wait()
    link.destroy()
    return 0


def _serve(start: WorkerStart, link: ZmqWorkerLink, tricks: Sequence[str]) -> None:
    size = start.settings.block_size
    cache = BytesDeviceCache(tiny_layout(size), NUM_BLOCKS)
    runtime = WorkerRuntime(
        RuntimeOptions(start.rank, lambda _: False, lambda: 1),
        link=link,
        model=TinyModel(cache, size, start.rank),
        transfer=tiny_transfer(cache, MemoryStore(), tp_size=start.settings.tp_size, rank=start.rank),
    )
    version = PROTOCOL_VERSION - ("old-protocol" in tricks)
    object_bytes = cache.layout.objects[BlockType.KV].object_bytes
    link.send(
        WorkerReady(version, start.rank, os.getpid(), NUM_BLOCKS, NUM_SLOTS, object_bytes, VOCAB, 1 << 20, [0], 1)
    )
    runtime.run()


def _exit_with_engine() -> None:
    while os.read(0, 1):
        continue
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
