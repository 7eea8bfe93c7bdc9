"""Judges the demo's phases and renders them: table for people, JSON for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier_operator.demo.answers import TIERS, Answer

MIN_TIER_SHARE = 0.95
"""Of the prompt's full blocks, from the phase's tier."""
EXPECTED_STORE_SPEEDUP = 8.0
"""Time to first token, cold over store hit, on an idle machine. A remark, never a failure: machines are shared."""


class PhaseName(StrEnum):
    """The phases, in order."""

    COLD = "cold"
    DEVICE = "device hit"
    HOST = "host hit"
    STORE = "store hit"
    GONE = "store gone"


_TIER_OF = {PhaseName.DEVICE: "device", PhaseName.HOST: "host", PhaseName.STORE: "store"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One answered request."""

    name: PhaseName
    answer: Answer


def faults(phases: Sequence[Phase], block_size: int) -> tuple[str, ...]:
    """Everything that a phase did not reach; empty when the demo succeeded."""
    found = [fault for phase in phases if (fault := _tier_fault(phase, block_size))]
    if missing := [name for name in PhaseName if name not in {phase.name for phase in phases}]:
        return (*found, f"not run: {', '.join(missing)}")
    if not token_ids_equal(phases):
        found.append("the phases answered with different tokens")
    return tuple(found)


def speed_remark(phases: Sequence[Phase]) -> str:
    """How much faster the store hit was than the cold answer. All phases must be there."""
    ttft = {phase.name: phase.answer.ttft_ms for phase in phases}
    speedup = ttft[PhaseName.COLD] / ttft[PhaseName.STORE]
    remark = f"store hit: first token {speedup:.1f}x faster than cold"
    if speedup < EXPECTED_STORE_SPEEDUP:
        remark += f"; an idle machine shows {EXPECTED_STORE_SPEEDUP:.0f}x or more"
    return remark


def token_ids_equal(phases: Sequence[Phase]) -> bool:
    """True when every phase generated the same, and something."""
    ids = {phase.answer.token_ids for phase in phases}
    return len(ids) == 1 and () not in ids


def report(phases: Sequence[Phase]) -> Mapping[str, Any]:
    """The content of ``report.json``."""
    return {
        "phases": [
            {
                "name": str(phase.name),
                "ttft_ms": round(phase.answer.ttft_ms, 3),
                "total_ms": round(phase.answer.total_ms, 3),
                "prompt_tokens": phase.answer.prompt_tokens,
                "cached_tokens": dict(phase.answer.cached_tokens),
                "token_ids": list(phase.answer.token_ids),
            }
            for phase in phases
        ],
        "token_ids_equal": token_ids_equal(phases),
    }


def table(phases: Sequence[Phase]) -> str:
    """The phases side by side: speed, and where the prompt's tokens came from."""
    header = ("phase", "first token", "vs cold", "total", "device", "host", "store", "computed")
    rows = [header, *(_row(phase, phases[0].answer.ttft_ms) for phase in phases)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    above = " " * (sum(widths[:4]) + 8) + "prompt tokens from"
    return "\n".join((above, lines[0], rule, *lines[1:]))


def _row(phase: Phase, cold_ms: float) -> tuple[str, ...]:
    answer = phase.answer
    cached = [answer.cached_tokens[tier] for tier in TIERS]
    return (
        str(phase.name),
        f"{answer.ttft_ms:,.0f} ms",
        f"{cold_ms / answer.ttft_ms:.1f}x",
        f"{answer.total_ms:,.0f} ms",
        *(f"{tokens:,}" for tokens in (*cached, answer.prompt_tokens - sum(cached))),
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def _tier_fault(phase: Phase, block_size: int) -> str:
    cached = phase.answer.cached_tokens
    if phase.name in _TIER_OF:
        tier = _TIER_OF[phase.name]
        full = phase.answer.prompt_tokens // block_size * block_size
        share = cached[tier] / full if full else 0.0
        return "" if share >= MIN_TIER_SHARE else f"{phase.name}: {share:.0%} of the full blocks came from {tier}"
    if sum(cached.values()):
        return f"{phase.name}: {sum(cached.values())} tokens came from a cache that should have been empty"
    return ""
