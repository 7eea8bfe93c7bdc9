"""One live request as the engine thread sees it: its tokens, its progress, and what it holds of each tier.

`LiveRequest` and `Holdings` are mutable and belong to the engine thread alone. Only `block_manager` changes a
`Holdings`; everybody else reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier_worker.core.ids import HostSlot, RequestId, Tier
from kvtier_worker.core.keys import DEFAULT_HASH_SEED, HashChain, digest128
from kvtier_worker.core.lifecycle import REQUEST_TABLE, RequestEvent, RequestState, advance
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.engine.frontend import EngineRequest, OutputSink
from kvtier_worker.engine.messages import SamplingSpec


class Origin(StrEnum):
    """How a device block of a request came to its content (R4)."""

    COMPUTED = "computed"  # this request computes it
    SHARED = "shared"  # another request or the cache had it on the device
    RESTORED = "restored"  # copied from a host slot


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of one device block, with the host slot it is restored from."""

    origin: Origin
    host_slot: HostSlot | None = None


COMPUTED = Provenance(Origin.COMPUTED)
SHARED = Provenance(Origin.SHARED)


@dataclass(slots=True)
class Holdings:
    """Leases of one request.

    Attributes:
        table: device blocks from position 0; one lease each.
        provenance: of each block of ``table``.
        num_settled: leading blocks of ``table`` whose content is whole and, if possible, published.
        pins: host slots by block index, leased so that they survive until the request is scheduled.
        restoring: host slots that the step in flight copies from; one lease each.
        reserved: host slots by block index, leased for the write-back of blocks about to be complete.
        store_filled: block indices whose host slot was filled by the prefetch this request waited for.
    """

    table: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    num_settled: int = 0
    pins: dict[int, int] = field(default_factory=dict)
    restoring: list[int] = field(default_factory=list)
    reserved: dict[int, int] = field(default_factory=dict)
    store_filled: set[int] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        """Whether nothing is leased."""
        return not (self.table or self.pins or self.restoring or self.reserved)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between `submit` and its last output.

    Attributes:
        request: as submitted.
        sink: takes its outputs.
        order: arrival number; smaller came first.
        chain: hashes of its full blocks.
        tokens: prompt and output so far.
        max_len: tokens of prompt and output at most.
        stop_ids: tokens that end it.
        sampling: what the worker needs to sample; complete unless ``needs_history``.
        num_computed: leading tokens whose cache entries are whole once no step is in flight.
        num_failures: steps without restores that failed under it since it last made progress.
        shun_host: a step with restores failed under it: compute instead.
        counted: whether its prompt is in the token counters.
        cached: prompt tokens by the tier they came from, of its first admission that succeeded.
        last_token_at: clock of its last token, or of its arrival.
    """

    request: EngineRequest
    sink: OutputSink
    order: int
    chain: HashChain
    tokens: list[int]
    max_len: int
    stop_ids: frozenset[int]
    sampling: SamplingSpec
    last_token_at: float
    held: Holdings = field(default_factory=Holdings)
    state: RequestState = RequestState.PREFETCHING
    num_computed: int = 0
    num_failures: int = 0
    shun_host: bool = False
    counted: bool = False
    cached: Mapping[Tier, int] = field(default_factory=dict)
    needs_history: bool = field(init=False)
    prompt_len: int = field(init=False)
    max_tokens_len: int = field(init=False)
    rank_key: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.needs_history = self.request.sampling.needs_history
        self.prompt_len = len(self.request.prompt_token_ids)
        self.max_tokens_len = min(self.max_len, self.prompt_len + self.request.sampling.max_tokens)
        self.rank_key = (0, self.order)

    @property
    def request_id(self) -> RequestId:
        """Its id."""
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 = decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def apply(self, event: RequestEvent) -> None:
        """Move to the state that the table names. Raises IntegrityError if it names none."""
        self.state = advance(REQUEST_TABLE, self.state, event)

    def sampling_now(self) -> SamplingSpec:
        """What the worker needs to sample the next token."""
        if not self.needs_history:
            return self.sampling
        outputs = self.tokens[self.prompt_len :]
        return sampling_spec(self.request.sampling, self.sampling.seed, self.request.prompt_token_ids, outputs)


def sampling_spec(
    params: SamplingParams, seed: int, prompt: Iterable[int] = (), outputs: Iterable[int] = ()
) -> SamplingSpec:
    """The worker's part of ``params``; history only as far as a penalty needs it."""
    needs_prompt = params.repetition_penalty != 1.0
    return SamplingSpec(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=seed,
        logprobs=params.logprobs,
        prompt_token_ids=list(prompt) if needs_prompt else [],
        output_token_ids=list(outputs) if params.needs_history else [],
    )


def drawn_seed(request_id: RequestId, engine_seed: int) -> int:
    """The seed of a request that brings none: fixed by its id and ``--seed``; 63 bits."""
    digest = digest128(request_id.encode(), DEFAULT_HASH_SEED + engine_seed)
    return int.from_bytes(digest[:8], "little") >> 1
