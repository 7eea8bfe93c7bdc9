"""A copy engine as asynchronous as the contract allows, reproducibly from a seed, and device caches without torch.

Nothing is copied before somebody waits for it; then a seeded generator picks which stream goes on, so copies of
different streams run in every order that their events permit. Failures strike chosen copies. No threads, no clock.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_worker.adapters.cpu_copy import AddressableCache, BlockCopies
from kvtier_worker.core.ids import BlockType
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.arena import HostArena
from kvtier_worker.engine.ports import CopyCounters, CopyJob, CopyStream, Event
from kvtier_worker.errors import TransferFailed


class BytesDeviceCache:
    """Device blocks in plain memory of this process. See `DeviceCache`."""

    def __init__(self, layout: DomainLayout, num_blocks: int) -> None:
        self._layout = layout
        self._num_blocks = num_blocks
        self._memory = {
            block_type: (ctypes.c_uint8 * (objects.payload_bytes * num_blocks))()
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

    def address(self, block_type: BlockType) -> int:
        """Address of all blocks of one type."""
        return ctypes.addressof(self._memory[block_type])

    def view(self, block_type: BlockType) -> memoryview:
        """All bytes of one type, to read and write."""
        return memoryview(self._memory[block_type])

    def memory(self, block_type: BlockType) -> bytearray:
        """A copy of all bytes of one type."""
        return bytearray(self._memory[block_type])


class BytesArenaMemory:
    """Arena memory of this process that knows whether it was freed. See `ArenaMemory`."""

    def __init__(self) -> None:
        self._memory: ctypes.Array[ctypes.c_uint8] | None = None
        self.freed = False

    def allocate(self, nbytes: int) -> int:
        """See `ArenaMemory`."""
        self._memory = (ctypes.c_uint8 * nbytes)()
        return ctypes.addressof(self._memory)

    def free(self) -> None:
        """See `ArenaMemory`. The bytes stay, so that a late access is a failed assertion and not a crash."""
        self.freed = True


@dataclass(frozen=True, slots=True)
class CopyFaults:
    """Which copies fail, by their number in order of execution, counting from 0; each direction counts on its own."""

    restores: frozenset[int] = frozenset()
    writebacks: frozenset[int] = frozenset()


@dataclass(slots=True)
class _ChaosEvent:
    engine: ChaosCopyEngine
    happened: bool = False
    failure: str = ""

    def synchronize(self) -> None:
        self.engine.run_until(lambda: self.happened)
        if self.failure:
            raise TransferFailed(self.failure)

    def query(self) -> bool:
        return self.happened


@dataclass(slots=True)
class _ChaosStream:
    engine: ChaosCopyEngine
    work: deque[Callable[[], bool]] = field(default_factory=deque)
    failure: str = ""

    def wait(self, event: Event) -> None:
        self._queue(event.query)

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> None:
        self._queue(lambda: self._copy(lambda: self.engine.restore(job, start_layer, stop_layer)))

    def writeback(self, job: CopyJob) -> None:
        self._queue(lambda: self._copy(lambda: self.engine.writeback(job)))

    def launch(self, kernel: Callable[[], object]) -> None:
        self._queue(lambda: (kernel(), True)[1])

    def record(self) -> Event:
        event = _ChaosEvent(self.engine)
        self._queue(lambda: self._settle(event))
        return event

    def synchronize(self) -> None:
        self.engine.run_until(lambda: not self.work)
        failure, self.failure = self.failure, ""
        if failure:
            raise TransferFailed(failure)

    def _queue(self, work: Callable[[], bool]) -> None:
        with self.engine.lock:
            self.work.append(work)

    def _settle(self, event: _ChaosEvent) -> bool:
        event.happened, event.failure = True, self.failure
        return True

    def _copy(self, copy: Callable[[], None]) -> bool:
        if not self.failure:
            try:
                copy()
            except (TransferFailed, IndexError, KeyError) as error:
                self.failure = str(error)
        return True


class ChaosCopyEngine:
    """See the module. Streams are used by any thread, one at a time.

    Args:
        arena: host side.
        caches: device side.
        seed: of the order of streams.
        faults: see `CopyFaults`.
        device_waits: compute waits for events on its stream, as on CUDA, instead of blocking the calling thread.
    """

    def __init__(
        self,
        arena: HostArena,
        caches: Sequence[AddressableCache],
        seed: int = 0,
        faults: CopyFaults | None = None,
        *,
        device_waits: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.log: list[str] = []
        self._copies = BlockCopies(arena, caches)
        self._random = random.Random(seed)  # noqa: S311 - reproducible order, not secrets
        self._faults = faults or CopyFaults()
        self._device_waits = device_waits
        self._compute = _ChaosStream(self)
        self._streams = [self._compute]
        self._restores = self._writebacks = 0
        self._bytes = {"restore": 0, "writeback": 0}

    @property
    def counters(self) -> CopyCounters:
        """See `CopyEngine`; time stands still here."""
        return CopyCounters(self._bytes["restore"], 0.0, self._bytes["writeback"], 0.0)

    def stream(self) -> CopyStream:
        """See `CopyEngine`."""
        stream = _ChaosStream(self)
        self._streams.append(stream)
        return stream

    def submit_compute(self, kernel: Callable[[], object]) -> None:
        """Queue work on the compute stream, like a kernel launch; it runs late and in order."""
        self._compute.launch(kernel)

    def record_compute(self) -> Event:
        """See `CopyEngine`."""
        return self._compute.record()

    def compute_waits(self, event: Event) -> float:
        """See `CopyEngine`."""
        if self._device_waits:
            self._compute.wait(event)
        else:
            event.synchronize()
        return 0.0

    def close(self) -> None:
        """See `CopyEngine`."""
        self.run_until(lambda: not any(stream.work for stream in self._streams))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let streams take steps in a random order until ``done``."""
        with self.lock:
            while not done():
                candidates = [stream for stream in self._streams if stream.work]
                self._random.shuffle(candidates)
                if not any(self._step(stream) for stream in candidates):
                    msg = "copy streams wait for each other"
                    raise TransferFailed(msg)

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> None:
        """One copy of a stream; fails if it is its turn to fail."""
        number, self._restores = self._restores, self._restores + 1
        if number in self._faults.restores:
            msg = f"restore {number} fails as planned"
            raise TransferFailed(msg)
        self.log.append(f"restore {job.role} [{start_layer}, {stop_layer})")
        self._bytes["restore"] += self._copies.restore(job, start_layer, stop_layer)

    def writeback(self, job: CopyJob) -> None:
        """One copy of a stream; fails if it is its turn to fail."""
        number, self._writebacks = self._writebacks, self._writebacks + 1
        if number in self._faults.writebacks:
            msg = f"write-back {number} fails as planned"
            raise TransferFailed(msg)
        self.log.append(f"writeback {job.role}")
        self._bytes["writeback"] += self._copies.writeback(job)

    @staticmethod
    def _step(stream: _ChaosStream) -> bool:
        if not stream.work[0]():
            return False
        stream.work.popleft()
        return True
