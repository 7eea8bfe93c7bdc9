"""What the HTTP front sees of the engine thread: submit, cancel, admin calls, health. Thread-safe by messages only.

`EngineClient` is the port; the engine loop implements it, `testing` has a scripted one for tests of the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.core.sampling import SamplingParams
from kvtier_worker.errors import KVTierError


class FinishReason(StrEnum):
    """Why a sequence ended; `STOP` and `LENGTH` are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class EngineBusy(KVTierError):
    """The engine takes no more requests now (429)."""


class EngineDraining(KVTierError):
    """The engine is shutting down (503)."""


class PromptTooLong(KVTierError):
    """The request can never fit (400); the message has both numbers."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. `n` of a client's request becomes n of these.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one token.
        sampling: validated.
        priority: smaller runs first under ``--priority_strategy=priority``.
        extra_key: mixed into the block hashes (tenant salt); empty = none.
        leader: for choices 1..n-1 of one prompt: the request id of choice 0, whose prefill they share; else None.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    extra_key: bytes = b""
    leader: RequestId | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the likeliest ones, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What is new of one sequence. The last output of every request has a ``finish_reason``.

    One is made per token: a struct costs a tenth of a frozen dataclass.

    Attributes:
        cached_tokens: prompt tokens not computed, by the tier they came from; set from the first token on.
        error: set when ``finish_reason`` is ERROR.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: Mapping[Tier, int] = msgspec.field(default_factory=dict)
    error: str = ""


OutputSink = Callable[[RequestOutput], None]
"""Called by the engine thread for every output; must not block (it hands over to the event loop)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front needs to know of a started engine."""

    model_id: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_device_blocks: int
    num_host_slots: int
    tp_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Alive: the loop turns and every worker lives. Ready: it also takes requests."""

    alive: bool
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Outcome of one pool's integrity check."""

    name: str
    ok: bool
    usable: int
    free: int
    leased: int
    cached: int
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What each tier holds of a prompt's full blocks. ``store`` counts blocks whole on every rank."""

    prompt_tokens: int
    full_blocks: int
    block_size: int
    device_blocks: int
    host_blocks: int
    store_blocks: int
    store_available: bool


class EngineClient(Protocol):
    """The engine as the HTTP front uses it."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the started engine."""

    def health(self) -> EngineHealth:
        """Current health; cheap."""

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Hand a request to the engine thread.

        Raises:
            EngineBusy, EngineDraining, PromptTooLong: refused; the sink is never called.
        """

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """The client wants no more. Idempotent; unknown ids are ignored.

        Args:
            request_id: of a request that may be live.
            reason: of its last output, and what it counts as: CANCELLED, or STOP when a stop string ended its text.
        """

    def drop_caches(self, tiers: frozenset[Tier]) -> Future[Mapping[Tier, int]]:
        """Forget cached blocks of these tiers (device, host); the result counts blocks dropped."""

    def probe(self, prompt_token_ids: tuple[int, ...], extra_key: bytes = b"") -> Future[ProbeReport]:
        """What each tier holds of a prompt; changes nothing, not even recency."""

    def integrity(self) -> Future[tuple[PoolReport, ...]]:
        """Run every pool's check."""

    def drain(self) -> Future[None]:
        """Take no more requests, finish running ones, flush write-backs; resolves when idle."""
