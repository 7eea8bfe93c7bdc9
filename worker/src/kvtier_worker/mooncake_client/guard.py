"""A Mooncake client that can only be called while it works.

A call on a client that was never set up, that failed its setup or that is closed ends the process with SIGSEGV, and a
call after a fork hangs. So the raw object lives in here only after a successful setup, every use goes through `use`,
and `close` waits until nobody is inside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kvtier_worker.mooncake_client.leaving import keep_for_ever


class RawClient(Protocol):
    """What we use of ``mooncake.store.MooncakeDistributedStore``."""

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0 or an error code for each key."""

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Bytes read or an error code for each key."""

    def batch_put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any
    ) -> list[int]:
        """0 or an error code for each key."""

    def register_buffer(self, address: int, nbytes: int) -> int:
        """0 or an error code."""

    def unregister_buffer(self, address: int) -> int:
        """0 or an error code."""

    def alloc_from_mem_pool(self, nbytes: int) -> int:
        """An address in memory shared with the mooncake_client, 0 if there is none."""

    def allocate_and_mount_segment(self, nbytes: int, protocol: str) -> dict[str, Any]:
        """``{"ret": code, "segment_ids": […]}``."""

    def unmount_and_free_segment(self, segment_ids: Sequence[str]) -> int:
        """0 or an error code; the master has dropped them when it returns."""

    def remove(self, key: str, force: bool) -> int:
        """0 or an error code; ``force`` ignores leases and pins."""

    def close(self) -> int:
        """0 or an error code."""


class ClientClosed(Exception):
    """The client is closed, closing, or belongs to another process."""


class GuardedClient:
    """Owner of one raw client that was set up. Thread-safe."""

    def __init__(self, raw: RawClient) -> None:
        self._raw: RawClient | None = raw
        self._process = os.getpid()
        self._inside = 0
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)

    def enter(self) -> RawClient:
        """The raw client, usable until `leave`, which must follow whatever happens. `use` does both.

        Raises:
            ClientClosed: it must not be called.
        """
        with self._lock:
            if self._raw is None or os.getpid() != self._process:
                raise ClientClosed
            self._inside += 1
            return self._raw

    def leave(self) -> None:
        """The other half of `enter`."""
        with self._lock:
            self._inside -= 1
            if self._raw is None and not self._inside:
                self._empty.notify_all()

    @contextmanager
    def use(self) -> Iterator[RawClient]:
        """The raw client, which stays usable until the block ends.

        Raises:
            ClientClosed: it must not be called.
        """
        raw = self.enter()
        try:
            yield raw
        finally:
            self.leave()

    def close(self, registered: Sequence[int] = (), *, keep: bool = False) -> None:
        """Refuse new users, wait for those inside, unregister these addresses, close. Idempotent.

        Calls inside end by Mooncake's own timeouts.

        Args:
            registered: addresses to unregister.
            keep: do not close but `keep_for_ever`: for clients of an HA group.
        """
        with self._lock:
            raw, self._raw = self._raw, None
            if raw is None or os.getpid() != self._process:
                return
            while self._inside:
                self._empty.wait()
        for address in registered:
            raw.unregister_buffer(address)
        if keep:
            keep_for_ever(raw)
        else:
            raw.close()
