"""The whole ``status`` of a KVCacheCluster. Pure; called by `reconcile`, written by `apply` where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import LedgerError, SpecError
from kvtier_operator.observed import Manifest, Observed
from kvtier_operator.planning.progress import Progress
from kvtier_operator.status.components import component_judgements
from kvtier_operator.status.conditions import LONGEST_MESSAGE, Judgement, failed, held, sentences, written
from kvtier_operator.status.facts import gather
from kvtier_operator.status.overall import available, degraded, progressing, ready
from kvtier_operator.status.phase import Phase, phase_of
from kvtier_operator.status.sections import sections_of

ORDER = (
    "Ready",
    "Available",
    "Progressing",
    "Degraded",
    "SpecValid",
    "PortsAllocated",
    "CoordinationReady",
    "MasterLeaderElected",
    "MetadataDurable",
    "StoreReady",
    "RolesReady",
    "RouterReady",
    "RolloutHalted",
    "DrainBlocked",
    "TransportPlaintext",
)
"""As they stand in the status: what people ask for first comes first."""


def status_of(cluster: KVCacheCluster, observed: Observed, progress: Progress) -> dict[str, Any]:
    """The status of a cluster whose spec is valid.

    Args:
        cluster: as wanted.
        observed: as it is, with the status as it stands: times and histories are carried on.
        progress: what the plan of this pass is doing.
    """
    facts = gather(cluster, observed, progress)
    found = [held("SpecValid", "Valid"), *component_judgements(facts), available(facts), progressing(facts)]
    judged = {one.name: one for one in found}
    judged["Ready"] = ready(facts, judged)
    judged["Degraded"] = degraded(facts, judged)
    generation = cluster.metadata.generation
    old = observed.status.get("conditions") or ()
    return {
        "observedGeneration": generation,
        "phase": str(phase_of(judged)),
        "conditions": written([judged[name] for name in ORDER], old, generation, observed.now),
        **sections_of(facts),
    }


def invalid_status(body: Manifest, error: SpecError, now: float) -> dict[str, Any]:
    """The status of an object whose spec is invalid: what was said of its children stays, nothing looks at them.

    Args:
        body: the object as the API server has it.
        error: everything that is wrong with it.
        now: seconds since the epoch.
    """
    message = f"{sentences(str(one) for one in error.violations)}; what runs is left alone until the spec is right"
    news = (
        failed("Ready", "SpecInvalid", "see SpecValid"),
        failed("Progressing", "SpecInvalid", "see SpecValid"),
        failed("SpecValid", "Invalid", message),
    )
    return _set_aside(body, news, Phase.FAILED, now)


def damaged_ledger_status(body: Manifest, error: LedgerError, now: float) -> dict[str, Any]:
    """The status of an object whose port ledger cannot be trusted: nothing is made or changed until it is mended.

    Args:
        body: the object as the API server has it.
        error: what is wrong with which entries.
        now: seconds since the epoch.
    """
    news = (
        failed("Ready", "PortsAllocated", "see PortsAllocated"),
        failed("Progressing", "NoPorts", "see PortsAllocated"),
        failed("PortsAllocated", "LedgerDamaged", f"{error}; what runs is left alone until then"),
    )
    serves = any(
        (one["type"], one["status"]) == ("Available", "True")
        for one in (body.get("status") or {}).get("conditions") or ()
    )
    return _set_aside(body, news, Phase.DEGRADED if serves else Phase.PENDING, now)


def refused_status(planned: Mapping[str, Any], live: Mapping[str, Any], message: str, now: float) -> dict[str, Any]:
    """The status of a cluster of which the API server will not accept an object.

    Args:
        planned: the status without that news.
        live: the status as it stands: times are carried on.
        message: what is refused, and what to do.
        now: seconds since the epoch.
    """
    news = (
        failed("Ready", "ApplyRefused", message),
        failed("Progressing", "ApplyRefused", message),
        held("Degraded", "ApplyRefused", message),
    )
    generation = int(planned.get("observedGeneration") or 0)
    judged = written(news, live.get("conditions") or (), generation, now)
    return {**planned, "phase": str(Phase.DEGRADED), "conditions": _replaced(planned, judged)}


def hindered_status(planned: Mapping[str, Any], obstacle: str) -> dict[str, Any]:
    """The status with the news that the next step failed and is tried again.

    Args:
        planned: the status without that news.
        obstacle: what failed, and why.
    """
    conditions = [
        {**one, "message": f"{one['message']}; {obstacle}".removeprefix("; ")[:LONGEST_MESSAGE]}
        if one["type"] == "Progressing"
        else one
        for one in planned.get("conditions") or ()
    ]
    return {**planned, "conditions": conditions}


def _set_aside(body: Manifest, news: Sequence[Judgement], phase: Phase, now: float) -> dict[str, Any]:
    """The status as it stands, with a few conditions judged anew."""
    status: Mapping[str, Any] = body.get("status") or {}
    generation = int(body["metadata"].get("generation") or 0)
    judged = written(news, status.get("conditions") or (), generation, now)
    conditions = _replaced(status, judged)
    return {**status, "observedGeneration": generation, "phase": str(phase), "conditions": conditions}


def _replaced(status: Mapping[str, Any], judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conditions of a status with these in place of those of their types."""
    conditions = {one["type"]: dict(one) for one in (*(status.get("conditions") or ()), *judged)}
    known = [name for name in ORDER if name in conditions]
    others = [name for name in conditions if name not in ORDER]
    return [conditions[name] for name in (*known, *others)]
