"""One HTTP request's sequences: submitted together, followed to the end, cancelled when nobody listens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvtier_worker.api.bridge import Channel
from kvtier_worker.api.choices import Choice, Delta
from kvtier_worker.api.front import Front
from kvtier_worker.api.problems import ApiError, engine_problem
from kvtier_worker.api.schema import GenerationRequest
from kvtier_worker.core.ids import RequestId, Tier
from kvtier_worker.engine.frontend import EngineRequest, FinishReason, RequestOutput
from kvtier_worker.errors import KVTierError


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt of a request, ready for the engine."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of the choice at ``index``."""

    index: int
    delta: Delta


class Generation:
    """The choices of one request: ``n`` for each prompt, choice ``j`` of prompt ``i`` at index ``i * n + j``.

    Use as an async context manager: entering submits, leaving cancels whatever has not finished.

    Args:
        front: where to work.
        request: what the client asked.
        request_id: the answer's id.
        jobs: its prompts.
        arrived: when the request came in, by the front's clock.
    """

    def __init__(
        self, front: Front, request: GenerationRequest, request_id: str, jobs: Sequence[PromptJob], arrived: float
    ) -> None:
        self._front = front
        self._request = request
        self.request_id = request_id
        self._jobs = jobs
        self._channel = Channel()
        ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= frozenset(front.engine.info.eos_token_ids)
        self.choices = [Choice(front.tokenizer, request.stops, ends) for _ in range(len(jobs) * request.n)]
        self._last_token_at = [arrived] * len(self.choices)
        self._index = {self._sequence_id(index): index for index in range(len(self.choices))}
        self._running: set[RequestId] = set()

    async def __aenter__(self) -> Self:
        """Submit every sequence, or none.

        Raises:
            ApiError: the engine refuses.
        """
        sink = self._front.bridge.sink(self._channel)
        extra_key = self._front.extra_key(self._request.cache_salt)
        try:
            for index in range(len(self.choices)):
                self._front.engine.submit(self._engine_request(index, extra_key), sink)
                self._running.add(self._sequence_id(index))
        except KVTierError as error:
            self._cancel_running()
            raise engine_problem(error) from error
        self._front.metrics.prompt_taken(self.prompt_tokens)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_running()

    def _cancel_running(self) -> None:
        for request_id in self._running:
            self._front.engine.cancel(request_id)
        self._running.clear()

    def _sequence_id(self, index: int) -> RequestId:
        return RequestId(f"{self.request_id}-{index}")

    def _engine_request(self, index: int, extra_key: bytes) -> EngineRequest:
        prompt, choice = divmod(index, self._request.n)
        job = self._jobs[prompt]
        return EngineRequest(
            request_id=self._sequence_id(index),
            prompt_token_ids=job.token_ids,
            sampling=self._request.sampling(job.max_tokens, choice),
            priority=self._request.priority,
            extra_key=extra_key,
            leader=self._sequence_id(index - choice) if choice else None,
        )

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What is new, in bursts, until every choice has ended.

        Raises:
            ApiError: the engine failed a sequence; the others are cancelled.
        """
        while self._running:
            outputs = await self._channel.take()
            # a choice that met a stop string has left already, maybe earlier in this burst
            news = [self._advance(output) for output in outputs if output.request_id in self._running]
            if news:
                yield news

    def _advance(self, output: RequestOutput) -> ChoiceDelta:
        if output.finish_reason is FinishReason.ERROR:
            raise ApiError(500, f"the engine failed this request: {output.error}", code="engine_error")
        if output.finish_reason is FinishReason.CANCELLED:
            raise ApiError(503, "the engine stopped this request; send it again", code="engine_stopping")
        index = self._index[output.request_id]
        choice = self.choices[index]
        self._measure(index, len(output.token_ids))
        delta = choice.advance(output)
        if delta.finish_reason is not None:
            self._running.discard(output.request_id)
            if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                self._front.engine.cancel(output.request_id, FinishReason.STOP)
        return ChoiceDelta(index, delta)

    def _measure(self, index: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = self._front.clock()
        waited, self._last_token_at[index] = now - self._last_token_at[index], now
        if self.choices[index].num_tokens:
            self._front.metrics.next_tokens(waited, num_tokens)
        else:
            self._front.metrics.first_token(waited, num_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever ``n``."""
        return sum(len(job.token_ids) for job in self._jobs)

    def usage(self) -> Mapping[str, object]:
        """OpenAI's ``usage``, with the cached tokens by tier."""
        output_tokens = sum(choice.num_tokens for choice in self.choices)
        leaders = self.choices[:: self._request.n]
        by_tier = {str(tier): sum(choice.cached_tokens.get(tier, 0) for choice in leaders) for tier in Tier}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self.prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "kvtier": by_tier},
        }
