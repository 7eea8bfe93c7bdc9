"""What an engine said, as records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TIERS = ("device", "host", "store")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion.

    Attributes:
        ttft_ms: from sending the request to the first token.
        total_ms: to the last.
        cached_tokens: prompt tokens by the tier that they came from.
    """

    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """How many of a prompt's full blocks each tier holds."""

    prompt_tokens: int
    full_blocks: int
    block_size: int
    blocks: Mapping[str, int]
