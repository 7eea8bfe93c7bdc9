"""How a choice reads in JSON: text completions and chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier_worker.api.choices import Delta
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.engine.frontend import FinishReason, TokenLogprob

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class AnswerFormat(Protocol):
    """One endpoint's way to write choices."""

    whole_object: str
    chunk_object: str

    def whole(self, index: int, part: Delta) -> dict[str, Any]:
        """A finished choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's first text; None = there is none."""

    def chunk(self, index: int, part: Delta) -> dict[str, Any]:
        """What is new of a choice."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a client wants beside the text."""

    tokenizer: TextTokenizer
    num_logprobs: int | None
    token_ids: bool

    @property
    def any(self) -> bool:
        """Whether chunks without text matter too."""
        return self.token_ids or self.num_logprobs is not None

    def add(self, choice: dict[str, Any], part: Delta, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Put the common fields into a choice."""
        choice["logprobs"] = logprobs
        choice["finish_reason"] = part.finish_reason
        if self.token_ids:
            choice["token_ids"] = part.token_ids
        return choice


class CompletionFormat:
    """``/v1/completions``."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, extras: Extras) -> None:
        self._extras = extras

    def whole(self, index: int, part: Delta) -> dict[str, Any]:
        """A finished choice."""
        return self.chunk(index, part)

    def opening(self, index: int) -> dict[str, Any] | None:  # noqa: ARG002 - a completion has no opening
        """Completions start with their text."""
        return None

    def chunk(self, index: int, part: Delta) -> dict[str, Any]:
        """What is new of a choice."""
        return self._extras.add({"index": index, "text": part.text}, part, self._logprobs(part))

    def _logprobs(self, part: Delta) -> Mapping[str, Any] | None:
        asked = self._extras.num_logprobs
        if asked is None:
            return None
        text = self._extras.tokenizer.token_text
        return {
            "tokens": [text(entry.token_id) for entry in part.logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in part.logprobs],
            "top_logprobs": [self._top(entry) for entry in part.logprobs] if asked else None,
            "text_offset": part.text_offsets,
        }

    def _top(self, entry: TokenLogprob) -> Mapping[str, float]:
        text = self._extras.tokenizer.token_text
        top = {text(token_id): _finite(logprob) for token_id, logprob in entry.top}
        return top | {text(entry.token_id): _finite(entry.logprob)}


class ChatFormat:
    """``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, extras: Extras) -> None:
        self._extras = extras

    def whole(self, index: int, part: Delta) -> dict[str, Any]:
        """A finished choice."""
        message = {"role": "assistant", "content": part.text}
        return self._extras.add({"index": index, "message": message}, part, self._logprobs(part))

    def opening(self, index: int) -> dict[str, Any] | None:
        """Chats say first who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, part: Delta) -> dict[str, Any]:
        """What is new of a choice."""
        delta = {"content": part.text} if part.text else {}
        return self._extras.add({"index": index, "delta": delta}, part, self._logprobs(part))

    def _logprobs(self, part: Delta) -> Mapping[str, Any] | None:
        if self._extras.num_logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in part.logprobs], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> Mapping[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return self._token(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self._extras.tokenizer
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def join(parts: Sequence[Delta]) -> Delta:
    """A choice's deltas as one."""
    finish: FinishReason | None = parts[-1].finish_reason if parts else None
    return Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        text_offsets=tuple(offset for part in parts for offset in part.text_offsets),
        finish_reason=finish,
    )
