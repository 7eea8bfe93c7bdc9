"""A store in memory: the same port, the same rules, no processes.

`MemoryBackend` is what instances share, like the segments of a Mooncake cluster: give one backend to several
`MemoryStore` to play several processes, or to a new one to play a restart.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from kvtier_worker.engine.ports import GetOutcome, PutOutcome, StoreBuffer
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.machine.memory import PageMemory, allocate_pages
from kvtier_worker.machine.ranges import MemoryRanges


class MemoryBackend:
    """Objects by key, bounded in bytes if asked. Thread-safe.

    Args:
        capacity_bytes: above this a put fails; None = no bound. Nothing is evicted by itself.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def keys(self) -> Sequence[str]:
        """Every key, oldest first."""
        with self._lock:
            return tuple(self._objects)

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        with self._lock:
            return sum(map(len, self._objects.values()))

    def read(self, key: str) -> bytes | None:
        """Its bytes, or None."""
        with self._lock:
            return self._objects.get(key)

    def write(self, key: str, content: bytes) -> PutOutcome:
        """Store unless it exists."""
        with self._lock:
            if key in self._objects:
                return PutOutcome.EXISTS
            used = sum(map(len, self._objects.values())) if self._capacity_bytes is not None else 0
            if self._capacity_bytes is not None and used + len(content) > self._capacity_bytes:
                return PutOutcome.FAILED
            self._objects[key] = content
            return PutOutcome.STORED

    def replace(self, key: str, content: bytes) -> None:
        """Overwrite, as only a fault would."""
        with self._lock:
            self._objects[key] = content

    def remove(self, key: str) -> None:
        """Evict."""
        with self._lock:
            self._objects.pop(key, None)

    def clear(self) -> None:
        """Evict everything, like a store that restarted."""
        with self._lock:
            self._objects.clear()


class MemoryStore:
    """`KVCacheStore` over a `MemoryBackend`."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self.backend = backend if backend is not None else MemoryBackend()
        self._ranges = MemoryRanges()
        self._pages: list[PageMemory] = []
        self._errors: Counter[str] = Counter()
        self._open = True
        self._calls = 0
        self._condition = threading.Condition()

    @property
    def state(self) -> str:
        """Memory is always in use."""
        return "closed"

    @property
    def error_counts(self) -> Mapping[str, int]:
        """Errors since the start, by name."""
        with self._condition:
            return dict(self._errors)

    def allocate(self, nbytes: int) -> int:
        """Address of zeroed memory, valid until `close`.

        Raises:
            StoreUnavailable: the store is closed, or the size makes no sense.
        """
        if nbytes <= 0 or not self._open:
            raise StoreUnavailable(f"cannot allocate {nbytes} bytes from this store")
        self._pages.append(allocate_pages(nbytes))
        return self._pages[-1].address

    def register(self, address: int, nbytes: int) -> None:
        """Register a range; the same one twice is one registration.

        Raises:
            StoreUnavailable: overlap, no memory, or the store is closed.
        """
        with self._condition:
            if not self._open:
                raise StoreUnavailable("cannot register: the store is closed")
            if self._ranges.admits(address, nbytes):
                self._ranges.add(address, nbytes)

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which keys are there."""
        return [self._open and self.backend.read(key) is not None for key in keys]

    def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        """Read each object whose size is exactly the buffer's."""
        keys = [buffer.key for buffer in buffers]
        if len(set(keys)) != len(keys):
            self._count("duplicate_keys")
            return [GetOutcome.MISS] * len(keys)
        if not self._enter():
            return [GetOutcome.MISS] * len(keys)
        try:
            return [self._read(buffer) for buffer in buffers]
        finally:
            self._leave()

    def _read(self, buffer: StoreBuffer) -> GetOutcome:
        if not self._is_touchable(buffer):
            return GetOutcome.MISS
        content = self.backend.read(buffer.key)
        if content is None:
            return GetOutcome.MISS
        if len(content) != buffer.nbytes:
            self._count("size_mismatch")
            return GetOutcome.MISS
        ctypes.memmove(buffer.address, content, buffer.nbytes)
        return GetOutcome.HIT

    def put(self, buffers: Sequence[StoreBuffer]) -> Sequence[PutOutcome]:
        """Write each object unless its key exists; a repeated key exists after its first buffer."""
        if not self._enter():
            return [PutOutcome.FAILED] * len(buffers)
        try:
            refused: set[str] = set()
            outcomes: list[PutOutcome] = []
            for buffer in buffers:
                outcome = PutOutcome.FAILED if buffer.key in refused else self._write(buffer)
                if outcome is PutOutcome.FAILED:
                    refused.add(buffer.key)
                outcomes.append(outcome)
            return outcomes
        finally:
            self._leave()

    def _write(self, buffer: StoreBuffer) -> PutOutcome:
        if not self._is_touchable(buffer):
            return PutOutcome.FAILED
        outcome = self.backend.write(buffer.key, ctypes.string_at(buffer.address, buffer.nbytes))
        if outcome is PutOutcome.FAILED:
            self._count("no_space")
        return outcome

    def discard(self, keys: Sequence[str]) -> None:
        """Drop objects."""
        for key in keys:
            self.backend.remove(key)

    def close(self) -> None:
        """Wait for calls in flight; memory from `allocate` is gone then. Idempotent."""
        with self._condition:
            self._open = False
            while self._calls:
                self._condition.wait()
            self._ranges.clear()
            self._pages.clear()

    def _enter(self) -> bool:
        with self._condition:
            self._calls += self._open
            return self._open

    def _leave(self) -> None:
        with self._condition:
            self._calls -= 1
            self._condition.notify_all()

    def _is_touchable(self, buffer: StoreBuffer) -> bool:
        if buffer.nbytes <= 0:
            self._count("zero_size")
            return False
        if not self._ranges.contains(buffer.address, buffer.nbytes):
            self._count("unregistered_memory")
            return False
        return True

    def _count(self, name: str) -> None:
        with self._condition:
            self._errors[name] += 1
