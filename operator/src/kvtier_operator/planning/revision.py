"""Which revision of the engines a manifest asks for, and the model id that its store keys carry. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of all engine roles together, so that prefill and decode always belong together.

    Attributes:
        name: short hash of everything that makes an engine's pod what it is, replicas apart.
        lane: ``A`` or ``B``; two revisions that exist at the same time have different ones.
    """

    name: str
    lane: str
