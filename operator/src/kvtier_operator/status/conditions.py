"""Conditions: judged anew on each pass, written down with the time of the last change. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import Truth
from kvtier_operator.api.units import timestamp

LONGEST_MESSAGE = 2000
_LISTED = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """One condition as this pass sees it.

    Attributes:
        name: its type, as in docs/conditions.md.
        reason: one word for programs.
        message: what is so, of which object, and what to do next if something has to be done.
    """

    name: str
    truth: Truth
    reason: str
    message: str = ""

    @property
    def holds(self) -> bool:
        """True when it is known to hold."""
        return self.truth is Truth.TRUE


def held(name: str, reason: str, message: str = "") -> Judgement:
    """A condition that holds."""
    return Judgement(name, Truth.TRUE, reason, message)


def failed(name: str, reason: str, message: str = "") -> Judgement:
    """A condition that does not hold."""
    return Judgement(name, Truth.FALSE, reason, message)


def written(
    judgements: Iterable[Judgement], old: Sequence[Mapping[str, Any]], generation: int, now: float
) -> list[dict[str, Any]]:
    """The conditions as they stand in the status.

    Args:
        judgements: of this pass.
        old: conditions as they stand there now; the time of one whose status stays is kept.
        generation: of the spec that was judged.
        now: seconds since the epoch.
    """
    before = {condition.get("type"): condition for condition in old}
    return [_written(judgement, before.get(judgement.name, {}), generation, now) for judgement in judgements]


def listing(items: Sequence[str]) -> str:
    """The first items, and how many more there are."""
    more = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def sentences(parts: Iterable[str]) -> str:
    """Clauses as one message, each once."""
    return "; ".join(dict.fromkeys(part for part in parts if part))


def _written(judgement: Judgement, before: Mapping[str, Any], generation: int, now: float) -> dict[str, Any]:
    since = before.get("lastTransitionTime") if before.get("status") == judgement.truth else None
    return {
        "type": judgement.name,
        "status": str(judgement.truth),
        "reason": judgement.reason,
        "message": judgement.message[:LONGEST_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": since or timestamp(now),
    }
