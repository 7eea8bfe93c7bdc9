"""What a plan reads back from the status of the last pass, because nothing in the cluster shows it any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_operator.api.units import seconds_of
from kvtier_operator.observed import Observed


def last_leader(observed: Observed) -> str:
    """Pod of the master that led at the last pass; empty = none did."""
    return str((observed.status.get("leader") or {}).get("pod") or "")


def last_revision(observed: Observed) -> str:
    """Revision that served at the last pass; empty = none did."""
    return str((observed.status.get("revisions") or {}).get("current") or "")


def was_true(observed: Observed, condition: str) -> bool:
    """True if a condition held at the last pass."""
    return _condition(observed, condition).get("status") == "True"


def was_false(observed: Observed, condition: str) -> bool:
    """True if a condition did not hold at the last pass."""
    return _condition(observed, condition).get("status") == "False"


def was_halted(observed: Observed, generation: int) -> bool:
    """True if a rollout of this very spec has been halted: it stays so until the spec changes."""
    found = _condition(observed, "RolloutHalted")
    return found.get("status") == "True" and found.get("observedGeneration") == generation


def was_rolling_out(observed: Observed) -> bool:
    """True if engines of another revision still ran at the last pass."""
    return _condition(observed, "Progressing").get("reason") == "RollingOut"


def seconds_without_leader(observed: Observed) -> float:
    """For how long no master has led, as far as the status knows."""
    found = _condition(observed, "MasterLeaderElected")
    if found.get("status") != "False":
        return 0.0
    since = seconds_of(str(found.get("lastTransitionTime")))
    return max(0.0, observed.now - since) if since else 0.0


def _condition(observed: Observed, name: str) -> Mapping[str, Any]:
    conditions = observed.status.get("conditions") or ()
    return next((item for item in conditions if item.get("type") == name), {})
