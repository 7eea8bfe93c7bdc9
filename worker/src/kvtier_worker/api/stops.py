"""Stop strings in a stream of text: cut exactly, and nothing shown that might still turn out to be part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """What may be shown now, and whether a stop string was met (its text is not shown)."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds the stop string that is complete first, whatever pieces the text arrives in; of two, the longer one."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopOutcome:
        """Add ``text``. After a stop nothing more may be fed."""
        if not self._stops:
            return StopOutcome(text, stopped=False)
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return StopOutcome(text[: min(matches)[1]], stopped=True)
        shown = len(text) - self._possible_start(text)
        self._held = text[shown:]
        return StopOutcome(text[:shown], stopped=False)

    def flush(self) -> str:
        """The text held back, once no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
