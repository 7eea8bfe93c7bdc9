"""Where a store comes from in these tests: each world can open several stores on the same objects."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from kvtier_worker.adapters.mooncake_store import BreakerPolicy, MooncakeOptions, MooncakeStore
from kvtier_worker.engine.ports import KVCacheStore, StoreBuffer
from kvtier_worker.testing.faulty_store import FaultyStore
from kvtier_worker.testing.mooncake import running_master, running_mooncake_client
from kvtier_worker.testing.processes import free_port
from kvtier_worker.testing.store import MemoryBackend, MemoryStore

QUICK_BREAKER = BreakerPolicy(max_faults=3, first_pause_s=0.2, max_pause_s=0.5)
_names = itertools.count()


@dataclass(frozen=True, slots=True)
class World:
    """A cluster that stores can join."""

    name: str
    open_store: Callable[[], KVCacheStore]


def unique(prefix: str) -> str:
    """A key that no other test uses; the real worlds live as long as the module."""
    return f"{prefix}-{next(_names)}"


class Arena:
    """Memory of one store, registered, with helpers to fill and read it."""

    def __init__(self, store: KVCacheStore, nbytes: int = 2 << 20) -> None:
        self.address = store.allocate(nbytes)
        self.nbytes = nbytes
        store.register(self.address, nbytes)
        self._next = 0

    def buffer(self, key: str, content: bytes = b"", nbytes: int = 0) -> StoreBuffer:
        """A buffer of its own, holding ``content`` or ``nbytes`` of 0xEE."""
        size = len(content) or nbytes
        start = self._next
        self._next += -(-size // 64) * 64
        assert self._next <= self.nbytes, "the test's arena is too small"
        buffer = StoreBuffer(key, self.address + start, size)
        write(buffer, content or b"\xee" * size)
        return buffer


def write(buffer: StoreBuffer, content: bytes) -> None:
    """Put ``content`` at the start of the buffer."""
    ctypes.memmove(buffer.address, content, len(content))


def read(buffer: StoreBuffer) -> bytes:
    """The buffer's bytes."""
    return ctypes.string_at(buffer.address, buffer.nbytes)


def content_of(key: str, nbytes: int) -> bytes:
    """Bytes that belong to this key alone."""
    seed = xxhash.xxh3_128_digest(key.encode())
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def mooncake_options(master: str, *, shm_client: str = "", call_timeout_s: float = 2.0) -> MooncakeOptions:
    """Options of a client on this machine, with a port of its own and little patience."""
    return MooncakeOptions(
        master=master,
        local_hostname=f"127.0.0.1:{free_port()}",
        shm_client=shm_client,
        call_timeout_s=call_timeout_s,
        breaker=QUICK_BREAKER,
    )


@contextmanager
def memory_world() -> Iterator[World]:
    """Dictionaries."""
    backend = MemoryBackend()
    yield World("memory", lambda: MemoryStore(backend))


@contextmanager
def faulty_world() -> Iterator[World]:
    """The fault-injecting wrapper with nothing to inject."""
    backend = MemoryBackend()
    yield World("faulty", lambda: FaultyStore(MemoryStore(backend)))


@contextmanager
def mooncake_world(*, shared_memory: bool) -> Iterator[World]:
    """A master and a storage client, reached over TCP or through shared memory."""
    with running_master() as master, running_mooncake_client(master.address) as client:
        shm_client = client.rpc_address if shared_memory else ""
        yield World(
            "mooncake-shm" if shared_memory else "mooncake-tcp",
            lambda: MooncakeStore.connect(mooncake_options(master.address, shm_client=shm_client)),
        )


def puts(store: KVCacheStore, buffers: Sequence[StoreBuffer]) -> list[str]:
    """Outcomes by name."""
    return [outcome.value for outcome in store.put(buffers)]


def gets(store: KVCacheStore, buffers: Sequence[StoreBuffer]) -> list[str]:
    """Outcomes by name."""
    return [outcome.value for outcome in store.get(buffers)]
