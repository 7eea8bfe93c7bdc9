"""Messages between the engine process and its worker processes: typed, tagged, versioned; ZMQ carries the bytes.

Every request to a worker is answered exactly once, in any order across kinds, except that RegisterRestore and Forward
travel one serial lane: a worker registers a batch's restores before it looks at that batch's Forward (R2).
"""

from __future__ import annotations

import msgspec

from kvtier_worker.core.plans import PrefetchItem, RestoreItem, WritebackItem

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base: encoded as an array with the type's name in front. Messages form no cycles, so none is tracked."""


# worker -> engine, once, when it can serve


class WorkerReady(Message, frozen=True):
    """The worker has loaded the model, allocated its caches and set up its store."""

    version: int
    rank: int
    pid: int
    num_device_blocks: int  # including padding block 0
    num_host_slots: int  # including padding slot 0; 0 = no host tier
    object_bytes: int  # of the KV block of the target domain on this rank, trailer included
    vocab_size: int
    max_position: int
    eos_token_ids: list[int]
    resident_bytes: int


class WorkerProgress(Message, frozen=True):
    """What a starting worker is busy with. Sent before WorkerReady only; the worker group keeps it to itself."""

    rank: int
    text: str


class WorkerFailed(Message, frozen=True):
    """The worker cannot go on; it exits after this. ``violations`` non-empty = bad settings (exit 2)."""

    rank: int
    error: str
    violations: list[str] = []


# engine -> worker


class RegisterRestore(Message, frozen=True):
    """R2: register the H2D plan of a batch before its Forward. Answered by RestoreRegistered."""

    batch_id: int
    items: list[RestoreItem]


class SamplingSpec(Message, frozen=True):
    """The part of SamplingParams that the worker applies, with what it needs of the past."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int  # mixed with the position: tokens do not depend on batching or preemption
    logprobs: int | None
    prompt_token_ids: list[int] = []  # only when a penalty needs them
    output_token_ids: list[int] = []


class SequenceStep(Message, frozen=True):
    """What one sequence computes in one step.

    ``token_ids`` are the new tokens at positions [start, start + len); everything before ``start`` is in the cache
    through ``block_table`` (device blocks from position 0, long enough for the new tokens too).
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: bool  # False for a prompt chunk that does not end the prompt
    sampling: SamplingSpec | None = None  # set when sample


class Forward(Message, frozen=True):
    """Run one step. ``has_restore`` says that a RegisterRestore of this batch went before: missing = loud failure."""

    batch_id: int
    has_restore: bool
    sequences: list[SequenceStep]


class Prefetch(Message, frozen=True):
    """Read one batch of blocks from the store into host slots. Answered by PrefetchDone."""

    job_id: int
    offset: int  # of the first item in the job's list
    items: list[PrefetchItem]


class Writeback(Message, frozen=True):
    """Copy device blocks to host, then put them. Sent after the Forward that completed them.

    Answered by WritebackCopied (device blocks are free to go) and later by WritebackStored (host slots too).
    """

    job_id: int
    items: list[WritebackItem]


class StoreProbe(Message, frozen=True):
    """Which of these KV blocks does the store hold for this rank, in every domain? Answered by StoreProbed."""

    job_id: int
    block_hashes: list[bytes]


class StatsRequest(Message, frozen=True):
    """Ask for WorkerStats."""

    job_id: int


class Shutdown(Message, frozen=True):
    """Finish what is in flight, close the store, exit 0."""


# worker -> engine, answers


class RestoreRegistered(Message, frozen=True):
    """ACK of RegisterRestore; ``count`` must equal the number of items. ``error`` empty = accepted."""

    rank: int
    batch_id: int
    count: int
    error: str = ""


class TokenOutput(Message, frozen=True):
    """One sampled token. ``top`` = [(token id, log-probability)], likeliest first, when asked for."""

    request_id: str
    token_id: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = []


class ForwardDone(Message, frozen=True):
    """End of a step. Only rank 0 carries outputs. ``error`` non-empty: nothing of this step may be used."""

    rank: int
    batch_id: int
    outputs: list[TokenOutput]
    compute_s: float
    stall_s: float  # time the forward waited for restores
    error: str = ""


class PrefetchDone(Message, frozen=True):
    """One byte per item of the batch: 1 = every domain's object is whole in host memory."""

    rank: int
    job_id: int
    offset: int
    hits: bytes
    num_bytes: int
    seconds: float
    num_faults: int  # store errors, not absences
    num_corrupt: int  # checksum or length mismatches


class WritebackCopied(Message, frozen=True):
    """D2H of a job is over on this rank; it worked iff ``count`` equals the number of items."""

    rank: int
    job_id: int
    count: int
    num_bytes: int
    seconds: float
    error: str = ""


class WritebackStored(Message, frozen=True):
    """The put of a job is over on this rank, well or badly; host memory is no longer read."""

    rank: int
    job_id: int
    num_stored: int
    num_existing: int
    num_failed: int
    num_bytes: int
    seconds: float


class StoreProbed(Message, frozen=True):
    """One byte per hash: 1 = every domain's object exists. ``available`` False: the store did not answer."""

    rank: int
    job_id: int
    exists: bytes
    available: bool


class WorkerStats(Message, frozen=True):
    """Counters since the start of this worker, for /metrics, and its own check."""

    rank: int
    job_id: int
    resident_bytes: int
    restore_bytes: int
    restore_s: float
    writeback_bytes: int
    writeback_s: float
    store_state: str  # closed | open | half_open of the circuit breaker, or "off"
    store_errors: dict[str, int]
    faults: list[str]  # what the worker's own integrity check found


ToWorker = RegisterRestore | Forward | Prefetch | Writeback | StoreProbe | StatsRequest | Shutdown
FromWorker = (
    WorkerReady
    | WorkerFailed
    | RestoreRegistered
    | ForwardDone
    | PrefetchDone
    | WritebackCopied
    | WritebackStored
    | StoreProbed
    | WorkerStats
)
