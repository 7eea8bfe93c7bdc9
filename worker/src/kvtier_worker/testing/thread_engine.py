"""A whole engine in this process: the real loop, transfer, copy engine and model, ranks as threads, store in memory.

For the differential test, the mutation check and benches of the scheduler; starts in milliseconds once the weights are
loaded. What it leaves out is processes and ZeroMQ.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import Rank
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.frontend import EngineRequest, RequestOutput
from kvtier_worker.engine.loop import EngineLoop
from kvtier_worker.engine.messages import PROTOCOL_VERSION, WorkerReady
from kvtier_worker.engine.ports import CopyEngine, DeviceCache, KVCacheStore, ModelRunner
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.worker_runtime import RuntimeOptions, WorkerLink, WorkerRuntime
from kvtier_worker.testing.copy import BytesArenaMemory
from kvtier_worker.testing.thread_workers import ThreadWorkerGroup

CLOSE_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0

CopyEngineOf = Callable[[int, HostArena, Sequence[DeviceCache]], CopyEngine]
"""Makes the copy engine of a rank."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's model over a device cache of its own."""

    runner: ModelRunner
    cache: DeviceCache
    vocab_size: int
    max_position: int


@dataclass(frozen=True, slots=True)
class ThreadEngineSpec:
    """What to build.

    Attributes:
        settings: of the engine; ``tp_size`` ranks.
        num_host_slots: slots including padding slot 0; 0 = no host tier.
        models: one per rank.
        stores: one per rank, or empty without a store.
        copy_engine: see `CopyEngineOf`.
    """

    settings: WorkerSettings
    num_host_slots: int
    models: Sequence[RankModel]
    copy_engine: CopyEngineOf
    stores: Sequence[KVCacheStore] = ()


@dataclass(slots=True)
class ThreadEngine:
    """A running engine and what it answered.

    Attributes:
        loop: the engine; its thread runs.
        outputs: every output of every request, in order.
    """

    loop: EngineLoop
    outputs: queue.SimpleQueue[RequestOutput] = field(default_factory=queue.SimpleQueue)

    def submit(self, request: EngineRequest) -> None:
        """Hand in a request; its outputs arrive in `outputs`."""
        self.loop.submit(request, self.outputs.put)

    def next_output(self) -> RequestOutput:
        """The next output of any request.

        Raises:
            queue.Empty: nothing came for a long time; the engine hangs.
        """
        return self.outputs.get(timeout=ANSWER_TIMEOUT_S)


def _ready(spec: ThreadEngineSpec, rank: int) -> WorkerReady:
    model = spec.models[rank]
    return WorkerReady(
        version=PROTOCOL_VERSION,
        rank=rank,
        pid=rank,
        num_device_blocks=model.cache.num_blocks,
        num_host_slots=spec.num_host_slots,
        object_bytes=0,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
        eos_token_ids=[],
        resident_bytes=0,
    )


def _runtime(spec: ThreadEngineSpec, rank: int, link: WorkerLink) -> WorkerRuntime:
    settings, model = spec.settings, spec.models[rank]
    options = TransferOptions(
        model_id="thread-engine",
        num_host_slots=spec.num_host_slots,
        tp_size=settings.tp_size,
        tp_rank=Rank(rank),
        hash_seed=settings.xxh3_128bits_seed,
        layer_copies=settings.layers_wise_copy_batchs,
        verify=settings.enable_store_integrity,
    )
    transfer = HierarchyKVCacheTransfer(
        options,
        copy_engine=lambda arena, caches: spec.copy_engine(rank, arena, caches),
        memory=BytesArenaMemory(),
        store=spec.stores[rank] if spec.stores else None,
    )
    transfer.register_cache(model.cache)
    transfer.finalize_registration()
    runtime = RuntimeOptions(rank, is_fatal=lambda _error: True, resident_bytes=lambda: 0, num_prefetch_threads=2)
    return WorkerRuntime(runtime, link=link, model=model.runner, transfer=transfer)


@contextmanager
def thread_engine(spec: ThreadEngineSpec) -> Iterator[ThreadEngine]:
    """Run an engine; on the way out it drains nothing, stops, and every thread must end."""
    ready = [_ready(spec, rank) for rank in range(spec.settings.tp_size)]
    group = ThreadWorkerGroup(ready, lambda rank, link: _runtime(spec, rank, link))
    loop = EngineLoop(spec.settings, group)
    thread = threading.Thread(target=loop.run, name="engine")
    thread.start()
    try:
        yield ThreadEngine(loop)
    finally:
        loop.stop()
        thread.join(CLOSE_TIMEOUT_S)
        group.close(CLOSE_TIMEOUT_S)
