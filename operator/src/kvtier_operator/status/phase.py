"""The conditions in one word, for people who look at many clusters. Pure; nothing else decides it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from kvtier_operator.api import Truth
from kvtier_operator.status.conditions import Judgement
from kvtier_operator.status.overall import SCALED_TO_ZERO


class Phase(StrEnum):
    """Worth a look first: `FAILED`, `DEGRADED`, `PENDING`, `WAITING_FOR_APPROVAL`."""

    FAILED = "Failed"
    """The spec is invalid; what runs is left alone."""
    DELETING = "Deleting"
    PAUSED = "Paused"
    PENDING = "Pending"
    """It cannot start: there are no ports."""
    DEGRADED = "Degraded"
    WAITING_FOR_APPROVAL = "WaitingForApproval"
    ROLLING_OUT = "RollingOut"
    DRAINING = "Draining"
    IDLE = "Idle"
    """As specified, with no engine wanted."""
    READY = "Ready"
    PROVISIONING = "Provisioning"


_BY_PROGRESS = {
    "WaitingForApproval": Phase.WAITING_FOR_APPROVAL,
    "RollingOut": Phase.ROLLING_OUT,
    "Draining": Phase.DRAINING,
}


def phase_of(judged: Mapping[str, Judgement]) -> Phase:
    """The first that fits.

    Args:
        judged: every condition by its name.
    """
    return next(_fitting(judged))


def _fitting(judged: Mapping[str, Judgement]) -> Iterator[Phase]:
    progress = judged["Progressing"].reason
    if judged["SpecValid"].truth is Truth.FALSE:
        yield Phase.FAILED
    if progress in ("Deleting", "Paused"):
        yield Phase(progress)
    if judged["PortsAllocated"].truth is Truth.FALSE and not judged["Available"].holds:
        yield Phase.PENDING
    if any(judged[bad].holds for bad in ("Degraded", "RolloutHalted", "DrainBlocked")):
        yield Phase.DEGRADED
    if progress in _BY_PROGRESS:
        yield _BY_PROGRESS[progress]
    if judged["Ready"].holds:
        yield Phase.IDLE if judged["Ready"].reason == SCALED_TO_ZERO else Phase.READY
    yield Phase.PROVISIONING
