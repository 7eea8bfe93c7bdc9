"""Copies between the pinned host arena and device caches on a CUDA device. Same semantics as `cpu_copy`.

An object is contiguous on the host and strided on the device (one piece per layer and tensor). Copying the pieces one
by one would cost a driver call for each; so a block travels as one contiguous asynchronous copy to or from a staging
buffer on the device, and a kernel on the same stream scatters or gathers it there, at the speed of device memory. No
host thread waits for any of that, and staging memory is reused in stream order.
"""

# mypy: disallow-untyped-calls=False
# (torch.cuda's streams and events have no annotations)

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvtier_worker.core.ids import BlockId, BlockType, CacheRole, HostSlot
from kvtier_worker.engine.arena import HostArena, Region, planes
from kvtier_worker.engine.ports import CopyCounters, CopyJob, CopyStream, DeviceCache, Event
from kvtier_worker.engine.trailers import write_trailer
from kvtier_worker.errors import ConfigError, TransferFailed

STAGING_BYTES = 64 << 20
"""Device memory that one restore call may stage at once, more only if a single block needs it."""

CUDA_ERRORS = (RuntimeError,)
"""What torch raises for a failed driver call or a full device."""


class CudaCache(DeviceCache, Protocol):
    """A device cache on a CUDA device."""

    def flat(self, block_type: BlockType) -> torch.Tensor:
        """All bytes of one type: uint8, one dimension, laid out as `kvtier_worker.engine.arena.planes` says."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """One plane on the device, ``[layers, count, blocks, words]``, and where it is in a staged object layer."""

    offset: int
    nbytes: int
    device: torch.Tensor


def _widest(*sizes: int) -> torch.dtype:
    """The widest element that every one of these byte counts is a multiple of: wide elements make fast kernels."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(size % dtype.itemsize == 0 for size in sizes):
            return dtype
    return torch.uint8


@dataclass(frozen=True, slots=True)
class CudaObjects:
    """Both sides of one (domain, BlockType).

    Attributes:
        host: ``[slots, slot_bytes]``, uint8.
        planes: of one layer, in order.
    """

    region: Region
    host: torch.Tensor
    planes: tuple[_Plane, ...]

    def host_layers(self, slot: HostSlot, start: int, stop: int) -> torch.Tensor:
        """The contiguous bytes of some layers of one object."""
        first, last = self.region.layout.layer_span(start, stop)
        return self.host[slot, first:last]

    def pieces(self, staged: torch.Tensor, block: BlockId, start: int, stop: int) -> list[tuple[torch.Tensor, ...]]:
        """Pairs of equal shape (device view, staged view) of one block's layers ``[start, stop)``."""
        layers = staged.view(stop - start, self.region.layout.layer_bytes)
        found: list[tuple[torch.Tensor, ...]] = []
        for plane in self.planes:
            device = plane.device[start:stop, :, block]
            staged_plane = layers[:, plane.offset : plane.offset + plane.nbytes].view(plane.device.dtype)
            found.append((device, staged_plane.view(device.shape)))
        return found


def cuda_objects(arena: HostArena, cache: CudaCache, block_type: BlockType) -> CudaObjects:
    """Views of one region and of one cache's blocks that copies can be made between."""
    region = arena.regions[cache.layout.role, block_type]
    layout, blocks, flat = region.layout, cache.num_blocks, cache.flat(block_type)
    memory = (ctypes.c_uint8 * region.nbytes).from_address(arena.region_address(cache.layout.role, block_type))
    host = torch.frombuffer(memory, dtype=torch.uint8).view(region.num_slots, layout.slot_bytes)
    found: list[_Plane] = []
    for plane in planes(layout):
        dtype = _widest(plane.nbytes, plane.offset, layout.layer_bytes)
        unit = dtype.itemsize
        device = flat.view(dtype).as_strided(
            (layout.num_layers, plane.count, blocks, plane.nbytes // unit),
            (layout.layer_bytes * blocks // unit, plane.nbytes * blocks // unit, plane.nbytes // unit, 1),
            plane.offset * blocks // unit,
        )
        found.append(_Plane(plane.offset, plane.count * plane.nbytes, device))
    return CudaObjects(region, host, tuple(found))


@dataclass(slots=True)
class _Copy:
    """One copy call between two timing events; a writeback also owes its trailers until it is over."""

    before: torch.cuda.Event
    after: torch.cuda.Event
    nbytes: int
    is_restore: bool
    trailers: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Ledger:
    """Copies of one stream in order, settled once the device is past them: trailers written, time counted."""

    add: Callable[[_Copy], None]
    copies: deque[_Copy] = field(default_factory=deque)
    settled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, copy: _Copy) -> int:
        """Queue; returns the count that `settle` needs to include it."""
        with self.lock:
            self.copies.append(copy)
            return self.settled + len(self.copies)

    @property
    def count(self) -> int:
        """Everything queued so far."""
        with self.lock:
            return self.settled + len(self.copies)

    def settle(self, count: int) -> None:
        """The device is past the first ``count`` copies."""
        with self.lock:
            while self.settled < count:
                self._settle_first()

    def settle_ended(self) -> None:
        """Count the restores that the device is past, without waiting: nobody on the host ever waits for them.

        A writeback stays, with all behind it, for whoever waits for it: its trailers are work.
        """
        with self.lock:
            try:
                while self.copies and not self.copies[0].trailers and self.copies[0].after.query():
                    self._settle_first()
            except CUDA_ERRORS:
                return  # told to whoever waits

    def _settle_first(self) -> None:
        copy = self.copies.popleft()
        self.settled += 1
        for address, payload_bytes in copy.trailers:
            write_trailer(address, payload_bytes)
        self.add(copy)


class CudaEvent:
    """A CUDA event and the trailers of the copies before it. See `Event`."""

    def __init__(self, event: torch.cuda.Event, ledger: _Ledger | None, failure: str = "") -> None:
        self.event = event
        self.failure = failure
        self._ledger = ledger
        self._count = ledger.count if ledger is not None else 0

    def synchronize(self) -> None:
        """See `Event`."""
        try:
            self.event.synchronize()
        except CUDA_ERRORS as error:
            msg = f"CUDA copy: {error}"
            raise TransferFailed(msg) from error
        self._settle()
        if self.failure:
            raise TransferFailed(self.failure)

    def query(self) -> bool:
        """See `Event`."""
        if not self.event.query():
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        if self._ledger is not None:
            self._ledger.settle(self._count)


class CudaCopyStream:
    """A CUDA stream. See `CopyStream`."""

    def __init__(
        self,
        device: torch.device,
        objects: dict[tuple[CacheRole, BlockType], CudaObjects],
        arena: HostArena,
        add: Callable[[_Copy], None],
    ) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._objects = objects
        self._arena = arena
        self._ledger = _Ledger(add)
        self._failure = ""

    def wait(self, event: Event) -> None:
        """See `CopyStream`."""
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
            return
        event.synchronize()

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> None:
        """See `CopyStream`."""
        objects = self._objects[job.role, job.block_type]
        nbytes = (stop_layer - start_layer) * objects.region.layout.layer_bytes
        self._submit(lambda: self._restore(objects, job, start_layer, stop_layer), nbytes * len(job.pairs), (), True)

    def writeback(self, job: CopyJob) -> None:
        """See `CopyStream`."""
        objects = self._objects[job.role, job.block_type]
        payload = objects.region.layout.payload_bytes
        trailers = tuple((self._arena.slot_address(job.role, job.block_type, slot), payload) for slot, _ in job.pairs)
        self._submit(lambda: self._writeback(objects, job), payload * len(job.pairs), trailers, False)

    def record(self) -> Event:
        """See `CopyStream`."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaEvent(event, self._ledger, self._failure)

    def synchronize(self) -> None:
        """See `CopyStream`."""
        failure, self._failure = self._failure, ""
        try:
            self._stream.synchronize()
        except CUDA_ERRORS as error:
            msg = f"CUDA copy: {error}"
            raise TransferFailed(msg) from error
        self._ledger.settle(self._ledger.count)
        if failure:
            raise TransferFailed(failure)

    def settle_ended(self) -> None:
        """See `_Ledger.settle_ended`."""
        self._ledger.settle_ended()

    def _submit(
        self, work: Callable[[], None], nbytes: int, trailers: tuple[tuple[int, int], ...], is_restore: bool
    ) -> None:
        self.settle_ended()
        if self._failure:
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            before.record(self._stream)
            with torch.cuda.stream(self._stream):
                work()
            after.record(self._stream)
        except (*CUDA_ERRORS, IndexError, ValueError) as error:
            self._failure = f"CUDA copy: {type(error).__name__}: {error}"
            return
        self._ledger.append(_Copy(before, after, nbytes, is_restore, trailers))

    def _restore(self, objects: CudaObjects, job: CopyJob, start: int, stop: int) -> None:
        size = (stop - start) * objects.region.layout.layer_bytes
        per_call = max(1, STAGING_BYTES // size)
        staging = torch.empty(min(per_call, len(job.pairs)), size, dtype=torch.uint8, device=self._device)
        for first in range(0, len(job.pairs), per_call):
            pairs = job.pairs[first : first + per_call]
            for staged, (slot, _) in zip(staging, pairs, strict=False):
                staged.copy_(objects.host_layers(slot, start, stop), non_blocking=True)
            for staged, (_, block) in zip(staging, pairs, strict=False):
                for device, part in objects.pieces(staged, block, start, stop):
                    device.copy_(part)

    def _writeback(self, objects: CudaObjects, job: CopyJob) -> None:
        layers, size = objects.region.layout.num_layers, objects.region.layout.payload_bytes
        per_call = max(1, STAGING_BYTES // size)
        staging = torch.empty(min(per_call, len(job.pairs)), size, dtype=torch.uint8, device=self._device)
        for first in range(0, len(job.pairs), per_call):
            pairs = job.pairs[first : first + per_call]
            for staged, (_, block) in zip(staging, pairs, strict=False):
                for device, part in objects.pieces(staged, block, 0, layers):
                    part.copy_(device)
            for staged, (slot, _) in zip(staging, pairs, strict=False):
                objects.host_layers(slot, 0, layers).copy_(staged, non_blocking=True)


class CudaCopyEngine:
    """Streams between the pinned arena and caches on one CUDA device. See `CopyEngine`.

    Raises:
        ConfigError: the driver cannot pin the arena.
    """

    def __init__(self, arena: HostArena, caches: Sequence[CudaCache], device: torch.device) -> None:
        self._device = device
        self._arena = arena
        self._runtime: Any = torch.cuda.cudart()
        self._pin()
        self._objects = {
            (cache.layout.role, block_type): cuda_objects(arena, cache, block_type)
            for cache in caches
            for block_type in cache.layout.objects
        }
        self._streams: list[CudaCopyStream] = []
        self._lock = threading.Lock()
        self._total = CopyCounters()
        self._closed = False

    @property
    def counters(self) -> CopyCounters:
        """See `CopyEngine`."""
        for stream in tuple(self._streams):
            stream.settle_ended()
        return self._total

    def stream(self) -> CopyStream:
        """See `CopyEngine`."""
        stream = CudaCopyStream(self._device, self._objects, self._arena, self._count)
        self._streams.append(stream)
        return stream

    def record_compute(self) -> Event:
        """See `CopyEngine`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return CudaEvent(event, None)

    def compute_waits(self, event: Event) -> float:
        """See `CopyEngine`. The device waits, not the thread."""
        if not isinstance(event, CudaEvent):
            event.synchronize()
            return 0.0
        if event.failure:
            raise TransferFailed(event.failure)
        torch.cuda.current_stream(self._device).wait_event(event.event)
        return 0.0

    def close(self) -> None:
        """See `CopyEngine`."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            try:
                stream.synchronize()
            except TransferFailed:
                continue  # whoever waited for it has been told; here only the memory matters
        self._runtime.cudaHostUnregister(self._arena.address)

    def _pin(self) -> None:
        code = int(self._runtime.cudaHostRegister(self._arena.address, self._arena.nbytes, 0))
        if code:
            fault = (
                f"--host_blocks_factor: CUDA cannot pin a host arena of {self._arena.nbytes} bytes (error {code}); "
                "raise the memlock limit (ulimit -l unlimited, --ulimit memlock=-1) or lower the factor"
            )
            raise ConfigError([fault])

    def _count(self, copy: _Copy) -> None:
        seconds = copy.before.elapsed_time(copy.after) / 1000
        with self._lock:
            old = self._total
            if copy.is_restore:
                self._total = CopyCounters(
                    old.restore_bytes + copy.nbytes, old.restore_s + seconds, old.writeback_bytes, old.writeback_s
                )
            else:
                self._total = CopyCounters(
                    old.restore_bytes, old.restore_s, old.writeback_bytes + copy.nbytes, old.writeback_s + seconds
                )
