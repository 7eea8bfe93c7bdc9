"""The ports: what the engine needs from the outside, as Protocols. Adapters implement them; `testing.py` has fakes.

Two sides: the engine process talks to `WorkerGroup`; a worker process talks to `KVCacheStore`, `DeviceCache`,
`CopyEngine` and `ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier_worker.core.ids import BlockId, BlockType, CacheRole, HostSlot
from kvtier_worker.core.layout import DomainLayout
from kvtier_worker.engine.messages import FromWorker, SequenceStep, TokenOutput, ToWorker, WorkerReady

# engine process


class WorkerGroup(Protocol):
    """All worker processes of one engine. Called by the engine thread only."""

    @property
    def ready(self) -> Sequence[WorkerReady]:
        """What each rank reported, in rank order."""

    def send(self, message: ToWorker) -> None:
        """Send to every rank. Never blocks on a worker.

        Raises:
            WorkerDied: a rank's process is gone; the message names it.
        """

    def poll(self, timeout_s: float) -> Sequence[FromWorker]:
        """Everything that arrived; waits up to ``timeout_s`` for the first message, less when `wake` is called.

        Raises:
            WorkerDied: a rank's process is gone.
        """

    def wake(self) -> None:
        """Make a blocked `poll` return now. The only method that another thread may call."""

    def close(self, timeout_s: float) -> None:
        """Shut every rank down in order, then make sure that no process is left."""


# worker process: store


class GetOutcome(StrEnum):
    """What became of one read."""

    HIT = "hit"  # exactly the asked number of bytes is in the buffer
    MISS = "miss"  # the store does not have it, or not of this size
    FAULT = "fault"  # the store did not answer; counted apart


class PutOutcome(StrEnum):
    """What became of one write."""

    STORED = "stored"
    EXISTS = "exists"  # was there before; its content is untouched
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoreBuffer:
    """One object to read or write: its key and its place in registered memory."""

    key: str
    address: int
    nbytes: int


class KVCacheStore(Protocol):
    """Objects by key, shared by many processes. Thread-safe. Best effort: at run time nothing here raises.

    Memory handed to `get` and `put` must lie in a range registered before and stay valid until the call returns; the
    call never touches it afterwards, deadline or not. An implementation bounds every call in time.
    """

    def allocate(self, nbytes: int) -> int:
        """Address of zeroed memory for the host arena that this store reads and writes fastest.

        Owned by the store, valid until `close`.

        Raises:
            StoreUnavailable: it cannot.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Register a range for `get` and `put`. Same range twice is one registration; an overlap is refused.

        Raises:
            StoreUnavailable: refused.
        """

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which keys are there. Unknown = False."""

    def get(self, buffers: Sequence[StoreBuffer]) -> Sequence[GetOutcome]:
        """Read each object into its buffer. Keys must be distinct. A buffer's content is undefined unless HIT."""

    def put(self, buffers: Sequence[StoreBuffer]) -> Sequence[PutOutcome]:
        """Write each object unless its key exists. Keys may repeat; the first one counts."""

    def discard(self, keys: Sequence[str]) -> None:
        """Drop objects that could not be read, whoever has a lease on them, so that `put` writes them anew.

        Best effort. A reader at the same moment may get other bytes than it asked for: only with verification.
        """

    @property
    def state(self) -> str:
        """Circuit breaker: ``closed`` (in use), ``open`` (answers miss at once), ``half_open`` (one call tries)."""

    @property
    def error_counts(self) -> Mapping[str, int]:
        """Errors since the start, by name."""

    def close(self) -> None:
        """Wait for calls in flight, unregister, leave. Idempotent; afterwards everything is a miss."""


# worker process: device memory and copies


class Event(Protocol):
    """A point in a stream's work, like a CUDA event."""

    def synchronize(self) -> None:
        """Block the calling thread until it happened. Raises TransferFailed if its stream failed before it."""

    def query(self) -> bool:
        """Whether it happened."""


class DeviceCache(Protocol):
    """The device blocks of one cache domain on this rank."""

    @property
    def layout(self) -> DomainLayout:
        """Layout of one block."""

    @property
    def num_blocks(self) -> int:
        """Blocks including padding block 0."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Blocks of one domain and type to copy, all layers or a range of them."""

    role: CacheRole
    block_type: BlockType
    pairs: tuple[tuple[HostSlot, BlockId], ...]


class CopyStream(Protocol):
    """An ordered queue of copies, asynchronous to its caller, like a CUDA stream. One submitting thread at a time."""

    def wait(self, event: Event) -> None:
        """Work submitted later starts after ``event``. Order only: a failure before it stays its stream's own."""

    def restore(self, job: CopyJob, start_layer: int, stop_layer: int) -> None:
        """Queue host -> device of layers ``[start_layer, stop_layer)``."""

    def writeback(self, job: CopyJob) -> None:
        """Queue device -> host of all layers and roles, and the trailer."""

    def record(self) -> Event:
        """An event after everything submitted so far."""

    def synchronize(self) -> None:
        """Block until all submitted work ended. Raises TransferFailed if any of it failed; usable again then.

        Until then a failed stream skips its work, and events recorded on it after the failure have failed too.
        """


@dataclass(frozen=True, slots=True)
class CopyCounters:
    """Copies that ended well since the start; seconds are those of the copying itself, queueing excluded."""

    restore_bytes: int = 0
    restore_s: float = 0.0
    writeback_bytes: int = 0
    writeback_s: float = 0.0


class CopyEngine(Protocol):
    """Streams between one host arena and the registered device caches."""

    @property
    def counters(self) -> CopyCounters:
        """Work done so far; may lag behind copies that nobody waited for yet."""

    def stream(self) -> CopyStream:
        """A new stream."""

    def record_compute(self) -> Event:
        """An event after everything submitted to the compute stream so far. Called by the compute thread."""

    def compute_waits(self, event: Event) -> float:
        """Make compute submitted later wait for ``event``. Returns seconds the calling thread was blocked."""

    def close(self) -> None:
        """Drain every stream, then release. Idempotent."""


# worker process: model


class LayerGate(Protocol):
    """What the model asks before it touches a layer's cache."""

    def wait(self, layer: int) -> None:
        """Return when ``layer``'s blocks are restored, as far as compute submitted later is concerned.

        Raises:
            TransferFailed: the restore was aborted; nothing may be computed on these blocks.
        """


class ModelRunner(Protocol):
    """The model of one rank. Called by the compute thread only."""

    @property
    def layout(self) -> DomainLayout:
        """Layout of this rank's cache blocks."""

    def forward(self, sequences: Sequence[SequenceStep], gate: LayerGate | None) -> Sequence[TokenOutput]:
        """Compute one step; writes the new tokens' cache entries, returns a token per sampling sequence (rank 0).

        Returns when the step is over on the device too, whether or not it samples.
        """
