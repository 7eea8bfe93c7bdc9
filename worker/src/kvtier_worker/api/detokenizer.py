"""From token ids to text, one token at a time: the pieces add up to the decoding of the whole.

A window of recent tokens is decoded instead of the whole sequence:

    context        [0, shown)    tokens whose text is out; kept so that rules about the start of a text do not apply
    pending        [shown, end)  tokens whose text is not yet out, or only in part

Text is held back while later tokens may change it: a character whose bytes are incomplete (it decodes to U+FFFD), and
a run of byte-fallback tokens, which is valid or not as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def byte_tokens(self) -> frozenset[int]:
        """Ids of byte-fallback tokens; empty when the tokenizer has none."""

    @property
    def silent_tokens(self) -> frozenset[int]:
        """Ids of special tokens, which `decode` leaves out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""


class Detokenizer:
    """Text of one growing sequence."""

    __slots__ = ("_context", "_context_text", "_decoder", "_pending", "_shown")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending tokens that are out

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        if token_id in self._decoder.silent_tokens:
            return ""
        self._pending.append(token_id)
        if token_id in self._decoder.byte_tokens:
            return ""
        text = self._pending_text()
        stable = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if stable == len(text):
            self._slide()
        return piece

    def flush(self) -> str:
        """The text held back, once no more tokens come."""
        piece = self._pending_text()[self._shown :] if self._pending else ""
        self._pending = []
        self._shown = 0
        return piece

    def _pending_text(self) -> str:
        window = self._decoder.decode(self._context + self._pending)
        return window[len(self._context_text) :]

    def _slide(self) -> None:
        """Make the pending tokens the context, or part of it when alone they would have no text."""
        text = self._decoder.decode(self._pending)
        if text:
            self._context, self._context_text = self._pending, text
        else:
            self._context = self._context + self._pending
            self._context_text = self._decoder.decode(self._context)
        self._pending = []
        self._shown = 0
