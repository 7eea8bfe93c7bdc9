"""The memory that a node gives to the store, mounted in one of two ways.

`EmbeddedSegment`: in this process; leaving unmounts it at the master at once. `SharedSegment`: in a mooncake_client
that we supervise, because only that program lets engines of this machine read and write it through shared memory; it
cannot be told to unmount, so the master lists its segment for another ``--client_ttl`` after it ended.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.machine.memory import PageMemory, allocate_pages
from kvtier_worker.machine.ports import answers, hold_port, port_holder
from kvtier_worker.mooncake_client.guard import ClientClosed, GuardedClient, RawClient
from kvtier_worker.mooncake_client.library import MOUNTING_CALLS, SHARED_CALLS, load_mooncake
from kvtier_worker.store_node.canary import CANARY_BYTES, Canary, CanaryResult
from kvtier_worker.store_node.settings import StoreNodeSettings

_CHILD_THREADS = 2
"""Threads of the mooncake_client that serve engines; with one, a slow call of one engine stops all others."""
_CHILD_START_S = 20.0
_CHILD_STOP_S = 5.0
_SETTLE_S = 1.5
"""A mooncake_client that is back sooner than this is taken for the old one by engines; they would not share their
memory with it again."""
_POOL_BYTES = 4 << 20
_LOCAL_BUFFER_BYTES = 0
_MODULE = "kvtier_worker.store_node.child_exec"


class Segment(Protocol):
    """A mounted segment."""

    def look(self) -> CanaryResult:
        """Write and read a test object."""

    @property
    def ended(self) -> str:
        """Why it is gone without being closed; empty = it is there."""

    def retire_canary(self) -> None:
        """Remove the test object, so that nothing moves it to another node."""

    def close(self) -> str:
        """Unmount. Returns a sentence on what the master sees from now on. Idempotent."""


class _Probed:
    """What both kinds share: a client and a canary."""

    def __init__(self, client: GuardedClient, canary: Canary) -> None:
        self._client = client
        self._canary = canary

    def look(self) -> CanaryResult:
        """Write and read a test object."""
        try:
            with self._client.use() as raw:
                return self._canary.look(raw)
        except ClientClosed:
            return CanaryResult("closed", "the segment is being unmounted")

    def retire_canary(self) -> None:
        """Remove the test object."""
        try:
            with self._client.use() as raw:
                raw.remove(self._canary.key, True)
        except ClientClosed:
            return


class EmbeddedSegment(_Probed):
    """In this process."""

    def __init__(
        self,
        client: GuardedClient,
        canary: Canary,
        pages: PageMemory,
        label: socket.socket,
        ids: Sequence[str],
        *,
        keep_on_close: bool,
    ) -> None:
        super().__init__(client, canary)
        self._pages = pages
        self._label = label
        self._ids = list(ids)
        self._keep_on_close = keep_on_close

    @property
    def ended(self) -> str:
        """It lives as long as this process."""
        return ""

    def close(self) -> str:
        """Unmount at the master; its answer is awaited."""
        code = self._unmount()
        self._client.close([self._pages.address], keep=self._keep_on_close)
        self._label.close()
        if code != 0:
            return f"could not unmount ({code}); the master lists the segment until its --client_ttl is over"
        return "unmounted; the master dropped the segment and its objects"

    def _unmount(self) -> int:
        """Explicitly: closing the client of an HA group would do it half a minute later."""
        ids, self._ids = self._ids, []
        try:
            with self._client.use() as raw:
                return raw.unmount_and_free_segment(ids) if ids else 0
        except ClientClosed:
            return 0


class SharedSegment(_Probed):
    """In a mooncake_client of ours."""

    def __init__(
        self, client: GuardedClient, canary: Canary, child: subprocess.Popen[bytes], label: socket.socket
    ) -> None:
        super().__init__(client, canary)
        self._child = child
        self._label = label

    @property
    def ended(self) -> str:
        """How the mooncake_client ended, if it did."""
        code = self._child.poll()
        return "" if code is None else f"the mooncake_client ended with code {code}; its objects are lost"

    def close(self) -> str:
        """End the mooncake_client."""
        stop_child(self._child)
        self._client.close()
        self._label.close()
        return "the mooncake_client ended; the master lists its segment until its --client_ttl is over"


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, wait, SIGKILL."""
    child.terminate()
    try:
        child.wait(_CHILD_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def hold_label(settings: StoreNodeSettings) -> socket.socket:
    """Keep the port of ``--host`` to ourselves: Mooncake only uses it as a name and would let two nodes share it.

    Raises:
        StoreUnavailable: it cannot be bound.
    """
    endpoint = settings.endpoint
    try:
        return hold_port(endpoint.host, endpoint.port)
    except OSError as error:
        holder = f", held by {port_holder(endpoint.port)}" if "in use" in str(error) else ""
        raise StoreUnavailable(
            f"--host={endpoint} cannot be bound ({error.strerror or error}{holder}); "
            "use an address of this machine and a free port"
        ) from error


def mount_embedded(settings: StoreNodeSettings, label: socket.socket) -> EmbeddedSegment:
    """Mount in this process.

    Raises:
        StoreUnavailable: the master refused or does not answer.
    """
    module = load_mooncake(MOUNTING_CALLS)
    raw = module.MooncakeDistributedStore()
    code = raw.setup(
        settings.host,
        settings.metadata_server,
        0,
        _LOCAL_BUFFER_BYTES,
        settings.protocol,
        settings.rdma_devices if settings.protocol == "rdma" else "",
        settings.master_server_address,
    )
    if code != 0:
        raise StoreUnavailable(f"mooncake setup failed ({code}); check that the master serves")
    client = GuardedClient(raw)
    keep_on_close = settings.master.discovery
    ids = _allocate(client, raw, settings, keep_on_close=keep_on_close)
    pages = allocate_pages(2 * CANARY_BYTES)
    raw.register_buffer(pages.address, pages.nbytes)
    canary = _canary(settings, module, pages.address)
    return EmbeddedSegment(client, canary, pages, label, ids, keep_on_close=keep_on_close)


def _allocate(
    client: GuardedClient, raw: RawClient, settings: StoreNodeSettings, *, keep_on_close: bool
) -> Sequence[str]:
    try:
        mounted = raw.allocate_and_mount_segment(settings.segment_bytes, settings.protocol)
        problem = "" if mounted["ret"] == 0 else str(mounted["ret"])
    except MemoryError as error:
        problem = str(error)
    if problem:
        client.close(keep=keep_on_close)
        raise StoreUnavailable(
            f"no segment of {settings.global_segment_size} could be mounted ({problem}); "
            "lower --global_segment_size or free memory"
        )
    return list(mounted["segment_ids"])


def mount_shared(settings: StoreNodeSettings, label: socket.socket, should_stop: Callable[[], bool]) -> SharedSegment:
    """Start a mooncake_client, wait until it serves, join it by shared memory as an engine would.

    Raises:
        StoreUnavailable: it ended, does not answer in time, or the node is to stop.
    """
    module = load_mooncake(SHARED_CALLS)
    if answers("127.0.0.1", settings.shm_port, 0.3):
        raise StoreUnavailable(f"--shm_port={settings.shm_port} is held by {port_holder(settings.shm_port)}")
    settled = time.monotonic() + _SETTLE_S
    while time.monotonic() < settled and not should_stop():
        time.sleep(0.05)
    child = subprocess.Popen([sys.executable, "-m", _MODULE, str(os.getpid()), *client_argv(settings)])
    try:
        _wait_for_child(child, settings, should_stop)
        client, address = _join(module, settings.shm_port)
    except StoreUnavailable:
        stop_child(child)
        raise
    return SharedSegment(client, _canary(settings, module, address), child, label)


def _join(module: ModuleType, port: int) -> tuple[GuardedClient, int]:
    """A client of the mooncake_client, and registered memory for the canary."""
    raw = module.MooncakeDistributedStore()
    code = raw.setup_dummy(_POOL_BYTES, _LOCAL_BUFFER_BYTES, f"127.0.0.1:{port}")
    if code != 0:
        raise StoreUnavailable(f"the mooncake_client refused shared memory ({code})")
    client = GuardedClient(raw)
    address = raw.alloc_from_mem_pool(2 * CANARY_BYTES)
    if not address or raw.register_buffer(address, 2 * CANARY_BYTES) != 0:
        client.close()
        raise StoreUnavailable("the mooncake_client shares no memory with this process")
    return client, address


def _wait_for_child(
    child: subprocess.Popen[bytes], settings: StoreNodeSettings, should_stop: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + _CHILD_START_S
    while not answers("127.0.0.1", settings.shm_port, 0.3):
        if child.poll() is not None:
            raise StoreUnavailable(f"the mooncake_client ended with code {child.returncode}; is the master serving?")
        if should_stop() or time.monotonic() > deadline:
            raise StoreUnavailable(f"the mooncake_client does not serve after {_CHILD_START_S:.0f} s")
        time.sleep(0.05)


def client_argv(settings: StoreNodeSettings) -> tuple[str, ...]:
    """Command line of the mooncake_client.

    Raises:
        StoreUnavailable: it is not installed.
    """
    beside_python = Path(sys.executable).parent / "mooncake_client"
    program = str(beside_python) if beside_python.exists() else shutil.which("mooncake_client")
    if not program:
        raise StoreUnavailable("mooncake_client is not installed; pip install mooncake-transfer-engine-non-cuda")
    return (
        program,
        f"--host={settings.host}",
        f"--port={settings.shm_port}",
        f"--threads={_CHILD_THREADS}",
        f"--global_segment_size={settings.segment_bytes}",
        f"--master_server_address={settings.master_server_address}",
        f"--metadata_server={settings.metadata_server}",
        f"--protocol={settings.protocol}",
        f"--device_names={settings.rdma_devices if settings.protocol == 'rdma' else ''}",
        "--logtostderr",
    )


def _canary(settings: StoreNodeSettings, module: ModuleType, address: int) -> Canary:
    return Canary(str(settings.endpoint), address, module.ReplicateConfig())
