"""A worker process: reads its start record, builds model, caches, store and transfer, and serves one engine.

Composition root; decides nothing that a flag does not say. Exit status: 0 = told to stop, 1 = cannot go on,
2 = settings refused, 3 = the engine process disappeared.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import psutil
import torch
from torch import distributed

from kvtier_worker.adapters.cpu_copy import AddressableCache, CpuCopyEngine
from kvtier_worker.adapters.cuda_copy import CudaCache, CudaCopyEngine
from kvtier_worker.adapters.device_cache import TorchDeviceCache
from kvtier_worker.adapters.mooncake_store import MooncakeStore, options_from_settings
from kvtier_worker.adapters.zmq_link import ZmqWorkerLink
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.ids import BlockType, Rank
from kvtier_worker.core.keys import effective_model_id
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.arena import ArenaMemory, HostArena
from kvtier_worker.engine.messages import (
    PROTOCOL_VERSION,
    SamplingSpec,
    SequenceStep,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from kvtier_worker.engine.ports import CopyEngine, DeviceCache, KVCacheStore, ModelRunner
from kvtier_worker.engine.sizing import MemoryBudget, Sizes, plan_device_blocks, plan_sizes
from kvtier_worker.engine.transfers import HierarchyKVCacheTransfer, TransferOptions
from kvtier_worker.engine.worker_runtime import RuntimeOptions, WorkerRuntime
from kvtier_worker.engine.worker_start import WorkerStart, decode_start
from kvtier_worker.errors import ConfigError
from kvtier_worker.log import configure_logging, event
from kvtier_worker.machine.memory import (
    PageMemory,
    Span,
    allocate_pages,
    physical_memory_bytes,
    populate,
    return_free_pages,
)
from kvtier_worker.model.config import ModelConfig
from kvtier_worker.model.factory import (
    build_runner,
    cache_dtype,
    join_ranks,
    kv_layout,
    leave_ranks,
    load_config,
    load_decoder,
    resolve_device,
)
from kvtier_worker.mooncake_client.leaving import end_process

log = logging.getLogger(__name__)

EXIT_FAILED, EXIT_SETTINGS, EXIT_ORPHANED = 1, 2, 3
_STDIN = 0

_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN and of torch's layer over it, read at the first product. Both keep a kernel, about
0.3 MB, for every row count and weight shape they met; 1024 each, their default, is 600 MB under mixed load."""

_KERNELS_KEPT = "128"
_WARM_UP_TOKENS = 32
_MANY_TOKENS = 256


def main() -> int:
    """Serve one engine; returns the exit status."""
    start = decode_start(sys.stdin.buffer.readline())
    configure_logging(f"rank {start.rank}" if start.settings.tp_size > 1 else "worker")
    threading.Thread(target=_exit_with_engine, name="orphan-watch", daemon=True).start()
    link = ZmqWorkerLink(start.requests, start.answers)
    try:
        return _serve(start, link)
    except ConfigError as error:
        link.send(WorkerFailed(start.rank, str(error), list(error.violations)))
        return EXIT_SETTINGS
    except Exception as error:  # top of the process: the engine is told whatever it was
        log.exception("cannot start rank=%d", start.rank)
        link.send(WorkerFailed(start.rank, f"{type(error).__name__}: {error}"))
        return EXIT_FAILED
    finally:
        leave_ranks()
        link.destroy()


def _exit_with_engine() -> None:
    """End of file on standard input means that the engine process is gone: nobody is left to answer."""
    while os.read(_STDIN, 1):
        continue
    os._exit(EXIT_ORPHANED)


def _serve(start: WorkerStart, link: ZmqWorkerLink) -> int:
    settings, rank = start.settings, start.rank

    def progress(text: str) -> None:
        link.send(WorkerProgress(rank, text))

    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS_KEPT)
    config = load_config(settings.model)
    device = resolve_device(settings, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(settings.cpu_threads or max(1, len(os.sched_getaffinity(0)) // settings.tp_size))
    if settings.tp_size > 1:
        progress("meeting the other ranks")
        if start.rendezvous.startswith(("127.", "localhost:")):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    collective = join_ranks(rank, settings.tp_size, start.rendezvous, device)
    progress("loading weights")
    decoder = load_decoder(settings, config, collective, device)
    layout = kv_layout(config, settings.tp_size, settings.block_size, cache_dtype(settings, config, device))
    sizes = _sizes(settings, layout, device)
    store = _connect_store(settings, rank, progress)
    progress(f"allocating {sizes.num_device_blocks} device blocks and {sizes.num_host_slots} host slots")
    cache = TorchDeviceCache(layout, sizes.num_device_blocks, device)
    memory: _LockedMemory | _StoreMemory = _LockedMemory() if store is None else _StoreMemory(store)
    transfer = _build_transfer(settings, rank, sizes, device, store, memory=memory)
    transfer.register_cache(cache)
    transfer.finalize_registration()
    runner = build_runner(decoder, layout, cache.tensor(BlockType.KV))
    _warm_up(runner, settings.block_size)
    runtime = WorkerRuntime(
        RuntimeOptions(rank, _fatality(settings), _resident_bytes, tidy=_return_memory),
        link=link,
        model=runner,
        transfer=transfer,
    )
    link.send(_ready(rank, config, layout, sizes))
    if device.type == "cpu":
        spans = [*cache.spans(), *memory.spans]
        threading.Thread(target=populate, args=(spans,), name="populate", daemon=True).start()
    event(log, "ready", device=device, device_blocks=sizes.num_device_blocks, host_slots=sizes.num_host_slots)
    return EXIT_FAILED if runtime.run() else 0


def _warm_up(runner: ModelRunner, block_size: int) -> None:
    """Compute a short prompt and a token in a block nobody has yet, so that no client waits for first-use set-up."""
    count = min(block_size, _WARM_UP_TOKENS)
    greedy = SamplingSpec(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, None)
    for start, tokens in ((0, count), (count - 1, 1)):
        runner.forward([SequenceStep("warm-up", [0] * tokens, start, [1], sample=True, sampling=greedy)], None)


def _sizes(settings: WorkerSettings, layout: DomainLayout, device: torch.device) -> Sizes:
    budget = _budget(device)
    blocks = _least_of_ranks(plan_device_blocks(settings, layout, budget), device)
    return plan_sizes(settings, layout, blocks, budget)


def _budget(device: torch.device) -> MemoryBudget:
    available = psutil.virtual_memory().available
    if device.type == "cpu":
        total = physical_memory_bytes()
        available = min(available, total - _resident_bytes())
        return MemoryBudget(total, _resident_bytes(), available, device_is_host=True)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryBudget(total, total - free, available, device_is_host=False)


def _least_of_ranks(value: int, device: torch.device) -> int:
    """The least of all ranks' values: they share one block numbering."""
    if not distributed.is_initialized():
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MIN)
    return int(shared.item())


def _connect_store(settings: WorkerSettings, rank: int, progress: Callable[[str], None]) -> KVCacheStore | None:
    if not settings.enable_kvcache_store:
        return None
    progress("connecting to the store")
    return MooncakeStore.connect(options_from_settings(settings, Rank(rank), os.environ))


def _build_transfer(
    settings: WorkerSettings,
    rank: int,
    sizes: Sizes,
    device: torch.device,
    store: KVCacheStore | None,
    *,
    memory: ArenaMemory,
) -> HierarchyKVCacheTransfer:
    def copy_engine(arena: HostArena, caches: Sequence[DeviceCache]) -> CopyEngine:
        if device.type == "cpu":
            return CpuCopyEngine(arena, cast("Sequence[AddressableCache]", caches))
        return CudaCopyEngine(arena, cast("Sequence[CudaCache]", caches), device)

    options = TransferOptions(
        model_id=effective_model_id(settings),
        num_host_slots=sizes.num_host_slots,
        tp_size=settings.tp_size,
        tp_rank=Rank(rank),
        hash_seed=settings.xxh3_128bits_seed,
        layer_copies=settings.layers_wise_copy_batchs,
        verify=settings.enable_store_integrity,
    )
    return HierarchyKVCacheTransfer(options, copy_engine=copy_engine, memory=memory, store=store)


@dataclass(slots=True)
class _LockedMemory:
    """Arena memory of this process, locked if the limit allows. See `ArenaMemory`."""

    pages: PageMemory | None = None
    spans: tuple[Span, ...] = ()
    """None: its pages are resident from the start."""

    def allocate(self, nbytes: int) -> int:
        """See `ArenaMemory`."""
        try:
            self.pages = allocate_pages(nbytes)
        except OSError as error:
            raise ConfigError(
                [f"--host_blocks_factor: no memory for a host arena of {nbytes} bytes ({error}); lower it"]
            ) from error
        if self.pages.problem:
            log.warning("the host arena may be swapped: %s", self.pages.problem)
        return self.pages.address

    def free(self) -> None:
        """See `ArenaMemory`."""
        self.pages = None


@dataclass(slots=True)
class _StoreMemory:
    """Arena memory that the store owns and frees when it is closed. See `ArenaMemory`."""

    store: KVCacheStore
    spans: tuple[Span, ...] = ()

    def allocate(self, nbytes: int) -> int:
        """See `ArenaMemory`."""
        address = self.store.allocate(nbytes)
        self.spans = (Span(address, nbytes),)
        return address

    def free(self) -> None:
        """See `ArenaMemory`."""


def _fatality(settings: WorkerSettings) -> Callable[[Exception], bool]:
    """With several ranks a failed forward leaves them out of step; a CUDA error leaves the device unusable."""
    return lambda error: settings.tp_size > 1 or isinstance(error, torch.AcceleratorError)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _return_memory(num_tokens: int) -> None:
    """Activations of a long prompt leave holes in the heap that only grow: give their pages back."""
    if num_tokens >= _MANY_TOKENS:
        return_free_pages()


def _ready(rank: int, config: ModelConfig, layout: DomainLayout, sizes: Sizes) -> WorkerReady:
    return WorkerReady(
        version=PROTOCOL_VERSION,
        rank=rank,
        pid=os.getpid(),
        num_device_blocks=sizes.num_device_blocks,
        num_host_slots=sizes.num_host_slots,
        object_bytes=layout.objects[BlockType.KV].object_bytes,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        eos_token_ids=list(config.eos_token_ids),
        resident_bytes=_resident_bytes(),
    )


if __name__ == "__main__":
    end_process(main())
