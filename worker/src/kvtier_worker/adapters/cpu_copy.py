"""Copies between the host arena and device caches that live in ordinary memory: the CPU device.

A stream is a thread with an ordered queue, an event a point in that queue, so a copy overlaps compute just as on a
GPU and every ordering bug shows here too. The copying is one strided numpy assignment per block and layer range: it
runs outside the interpreter lock, on one core, at the speed of memcpy. (torch's own copy would start a second team of
OpenMP threads beside the compute thread's, and two teams spinning on the same cores stall each other for
milliseconds.)
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier_worker.core.ids import BlockType, CacheRole
from kvtier_worker.core.layout import ObjectLayout
from kvtier_worker.engine.arena import HostArena, planes
from kvtier_worker.engine.ports import CopyCounters, CopyJob, CopyStream, DeviceCache, Event
from kvtier_worker.engine.trailers import write_trailer
from kvtier_worker.errors import TransferFailed

Bytes = NDArray[np.uint8]


class AddressableCache(DeviceCache, Protocol):
    """A device cache in ordinary memory."""

    def address(self, block_type: BlockType) -> int:
        """Address of the first byte of one type's blocks, laid out as `kvtier_worker.engine.arena.planes` says."""


def _memory(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@dataclass(frozen=True, slots=True)
class PlaneView:
    """One plane of one (domain, BlockType) on both sides, as bytes.

    Attributes:
        host: ``[slots, layers, count, nbytes]``.
        device: ``[layers, count, blocks, nbytes]``.
    """

    host: Bytes
    device: Bytes


def plane_views(host: Bytes, device: Bytes, layout: ObjectLayout, num_slots: int, num_blocks: int) -> list[PlaneView]:
    """Views of a region's slots and of a cache's blocks that a strided copy can be made between."""
    views: list[PlaneView] = []
    layers, layer = layout.num_layers, layout.layer_bytes
    for plane in planes(layout):
        size = plane.nbytes
        host_view = as_strided(
            host[plane.offset :], (num_slots, layers, plane.count, size), (layout.slot_bytes, layer, size, 1)
        )
        device_view = as_strided(
            device[plane.offset * num_blocks :],
            (layers, plane.count, num_blocks, size),
            (layer * num_blocks, size * num_blocks, size, 1),
        )
        views.append(PlaneView(host_view, device_view))
    return views


class BlockCopies:
    """The copies themselves, on the calling thread."""

    def __init__(self, arena: HostArena, caches: Sequence[AddressableCache]) -> None:
        self._arena = arena
        self._views: dict[tuple[CacheRole, BlockType], list[PlaneView]] = {}
        for cache in caches:
            role, blocks = cache.layout.role, cache.num_blocks
            for block_type, layout in cache.layout.objects.items():
                region = arena.regions[role, block_type]
                host = _memory(arena.region_address(role, block_type), region.nbytes)
                device = _memory(cache.address(block_type), layout.payload_bytes * blocks)
                self._views[role, block_type] = plane_views(host, device, layout, region.num_slots, blocks)

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> int:
        """Host -> device of some layers; returns the bytes copied."""
        copied = 0
        for view in self._views[job.role, job.block_type]:
            device = view.device[start_layer:stop_layer]
            host = view.host[:, start_layer:stop_layer]
            for slot, block in job.pairs:
                np.copyto(device[:, :, block], host[slot])
            copied += len(job.pairs) * device[:, :, 0].size
        return copied

    def writeback(self, job: CopyJob) -> int:
        """Device -> host of all layers, then the trailers; returns the bytes copied."""
        layout = self._arena.regions[job.role, job.block_type].layout
        for slot, block in job.pairs:
            for view in self._views[job.role, job.block_type]:
                np.copyto(view.host[slot], view.device[:, :, block])
            write_trailer(self._arena.slot_address(job.role, job.block_type, slot), layout.payload_bytes)
        return len(job.pairs) * layout.payload_bytes


class _Counters:
    """Copy counters that streams add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = CopyCounters()

    def add(self, *, restore: bool, nbytes: int, seconds: float) -> None:
        with self._lock:
            old = self._total
            if restore:
                self._total = CopyCounters(
                    old.restore_bytes + nbytes, old.restore_s + seconds, old.writeback_bytes, old.writeback_s
                )
            else:
                self._total = CopyCounters(
                    old.restore_bytes, old.restore_s, old.writeback_bytes + nbytes, old.writeback_s + seconds
                )

    @property
    def total(self) -> CopyCounters:
        return self._total


class _QueuedEvent:
    """Set by its stream's thread, with the failure that came before it, if any."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self._failure = ""

    def settle(self, failure: str) -> None:
        self._failure = failure
        self._happened.set()

    def synchronize(self) -> None:
        self._happened.wait()
        if self._failure:
            raise TransferFailed(self._failure)

    def query(self) -> bool:
        return self._happened.is_set()


class _PastEvent:
    """An event of the compute thread, which has done everything it submitted by the time it records one."""

    def synchronize(self) -> None:
        """It happened."""

    def query(self) -> bool:
        return True


class CpuCopyStream:
    """A thread that copies in order. See `CopyStream`."""

    def __init__(self, name: str, copies: BlockCopies, counters: _Counters) -> None:
        self._copies = copies
        self._counters = counters
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, event: Event) -> None:
        """See `CopyStream`."""
        self._queue.put(lambda: _wait_for(event))

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> None:
        """See `CopyStream`."""
        self._queue.put(lambda: self._copy(lambda: self._copies.restore(job, start_layer, stop_layer), restore=True))

    def writeback(self, job: CopyJob) -> None:
        """See `CopyStream`."""
        self._queue.put(lambda: self._copy(lambda: self._copies.writeback(job), restore=False))

    def record(self) -> Event:
        """See `CopyStream`."""
        event = _QueuedEvent()
        self._queue.put(lambda: event.settle(self._failure))
        return event

    def synchronize(self) -> None:
        """See `CopyStream`."""
        event = _QueuedEvent()
        self._queue.put(lambda: self._settle_and_recover(event))
        event.synchronize()

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _settle_and_recover(self, event: _QueuedEvent) -> None:
        failure, self._failure = self._failure, ""
        event.settle(failure)

    def _copy(self, copy: Callable[[], int], *, restore: bool) -> None:
        if self._failure:
            return
        started = time.perf_counter()
        try:
            nbytes = copy()
        except (IndexError, KeyError, ValueError) as error:
            self._failure = f"{self._thread.name}: {type(error).__name__}: {error}"
            return
        self._counters.add(restore=restore, nbytes=nbytes, seconds=time.perf_counter() - started)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


def _wait_for(event: Event) -> None:
    try:
        event.synchronize()
    except TransferFailed:
        return  # order only; the failure belongs to the event's own stream


class CpuCopyEngine:
    """Streams between the host arena and caches in ordinary memory. See `CopyEngine`."""

    def __init__(self, arena: HostArena, caches: Sequence[AddressableCache]) -> None:
        self._copies = BlockCopies(arena, caches)
        self._counters = _Counters()
        self._streams: list[CpuCopyStream] = []

    @property
    def counters(self) -> CopyCounters:
        """See `CopyEngine`."""
        return self._counters.total

    def stream(self) -> CopyStream:
        """See `CopyEngine`."""
        stream = CpuCopyStream(f"copy-{len(self._streams)}", self._copies, self._counters)
        self._streams.append(stream)
        return stream

    def record_compute(self) -> Event:
        """See `CopyEngine`."""
        return _PastEvent()

    def compute_waits(self, event: Event) -> float:
        """See `CopyEngine`."""
        if event.query():
            event.synchronize()  # raises if it failed
            return 0.0
        started = time.perf_counter()
        event.synchronize()
        return time.perf_counter() - started

    def close(self) -> None:
        """See `CopyEngine`."""
        while self._streams:
            self._streams.pop().close()
