"""One choice of an answer: from the engine's outputs to text, stop strings cut, tokens beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_worker.api.detokenizer import Decoder, Detokenizer
from kvtier_worker.api.stops import StopMatcher
from kvtier_worker.core.ids import Tier
from kvtier_worker.engine.frontend import FinishReason, RequestOutput, TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice.

    Attributes:
        text: text that is now certain.
        token_ids: tokens generated; their text may still be held back.
        logprobs: one per token, when asked for.
        text_offsets: characters of the choice before each of the tokens, those held back included.
        finish_reason: set in the last delta.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    text_offsets: tuple[int, ...]
    finish_reason: FinishReason | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client who asked for text only."""
        return not self.text and self.finish_reason is None


class Choice:
    """State of one sequence on its way to the client.

    Args:
        decoder: the tokenizer.
        stops: stop strings.
        stop_token_ids: tokens that end the sequence without being part of its text.
    """

    __slots__ = ("_detokenizer", "_hidden_ends", "_num_chars", "_stops", "cached_tokens", "finish_reason", "num_tokens")

    def __init__(self, decoder: Decoder, stops: Sequence[str], stop_token_ids: frozenset[int]) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._stops = StopMatcher(stops)
        self._hidden_ends = stop_token_ids
        self._num_chars = 0
        self.num_tokens = 0
        self.cached_tokens: Mapping[Tier, int] = {}
        self.finish_reason: FinishReason | None = None

    def advance(self, output: RequestOutput) -> Delta:
        """Take one output; tokens after a stop string are dropped."""
        if output.cached_tokens:
            self.cached_tokens = output.cached_tokens
        pieces: list[str] = []
        offsets: list[int] = []
        last = len(output.token_ids) - 1
        taken = 0
        for place, token_id in enumerate(output.token_ids):
            taken += 1
            offsets.append(self._num_chars)
            ends = output.finish_reason is FinishReason.STOP and place == last and token_id in self._hidden_ends
            if not ends and self._show(self._detokenizer.push(token_id), pieces):
                break
        if self.finish_reason is None and output.finish_reason is not None:
            self._finish(output.finish_reason, pieces)
        self.num_tokens += taken
        text = "".join(pieces)
        return Delta(text, output.token_ids[:taken], output.logprobs[:taken], tuple(offsets), self.finish_reason)

    def _show(self, text: str, pieces: list[str]) -> bool:
        """Pass text through the stop matcher; returns whether the choice has ended."""
        outcome = self._stops.feed(text)
        pieces.append(outcome.text)
        self._num_chars += len(text)
        if outcome.stopped:
            self.finish_reason = FinishReason.STOP
        return outcome.stopped

    def _finish(self, reason: FinishReason, pieces: list[str]) -> None:
        if not self._show(self._detokenizer.flush(), pieces):
            pieces.append(self._stops.flush())
            self.finish_reason = reason
