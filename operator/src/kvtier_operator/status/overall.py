"""Conditions of the cluster as a whole. Pure; called by `document`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtier_operator.observed import Component, ObservedPod
from kvtier_operator.planning.pods import blocker
from kvtier_operator.status.conditions import Judgement, failed, held, listing, sentences
from kvtier_operator.status.facts import Facts

NEEDED = (
    "PortsAllocated",
    "CoordinationReady",
    "MasterLeaderElected",
    "StoreReady",
    "RolesReady",
    "RouterReady",
)
"""Conditions without which a cluster is not ready."""

SCALED_TO_ZERO = "ScaledToZero"

_Words = tuple[str, str]
"""Reason and message."""


def available(facts: Facts) -> Judgement:
    """Requests can be served."""
    name = "Available"
    if facts.idle:
        return failed(name, SCALED_TO_ZERO, "no engine is wanted; raise spec.roles[].replicas")
    words = sentences(role.words for role in facts.roles)
    if not facts.served_by:
        together = "prefill and decode of one revision serve together; " if facts.cluster.router else ""
        return failed(name, "NoEngine", together + words)
    if facts.cluster.router is not None and not facts.router.ready:
        return failed(name, "NoRouter", facts.router.words)
    return held(name, "Serving", f"revision {facts.served_by}: {words}")


def progressing(facts: Facts) -> Judgement:
    """Something is being changed, and goes on by itself."""
    name = "Progressing"
    stop = next(_stops(facts), None)
    if stop is not None and not facts.cluster.metadata.deleting:
        return failed(name, *stop)
    move = next(_moves(facts), None)
    return failed(name, "Settled") if move is None else held(name, *move)


def ready(facts: Facts, judged: Mapping[str, Judgement]) -> Judgement:
    """All that the spec asks for runs in its newest form, and nothing else does."""
    lacking = next(_lacks(facts, judged), None)
    if lacking is not None:
        return failed("Ready", *lacking)
    return held("Ready", SCALED_TO_ZERO if facts.idle else "AsSpecified")


def degraded(facts: Facts, judged: Mapping[str, Judgement]) -> Judgement:
    """Something that the cluster had, or that cannot come by itself, is missing."""
    name = "Degraded"
    if facts.cluster.metadata.deleting:
        return failed(name, "Deleting")
    loss = next(_losses(facts, judged), None)
    if loss is not None:
        return held(name, *loss)
    return failed(name, "AsWanted" if facts.established else "NotServedYet")


def _stops(facts: Facts) -> Iterator[_Words]:
    """Why nothing goes on by itself, what matters most first."""
    progress, rollout = facts.progress, facts.progress.rollout
    if facts.cluster.paused:
        yield "Paused", "spec.paused is true: nothing is changed, whatever happens"
    if progress.conflicts:
        yield "Conflict", _conflicts(facts)
    if progress.exhausted or progress.taken_ports:
        yield "NoPorts", "see PortsAllocated"
    if rollout.halted:
        yield "RolloutHalted", "see RolloutHalted"
    if progress.blocked_drains:
        yield "DrainBlocked", "see DrainBlocked"
    if rollout.approval_wanted:
        annotate = f"kubectl annotate kvc {facts.cluster.name} kvtier.dev/approve={rollout.target}"
        yield "WaitingForApproval", f"revision {rollout.target} is not rolled out yet; {annotate}"


def _moves(facts: Facts) -> Iterator[_Words]:
    """What goes on."""
    progress, rollout = facts.progress, facts.progress.rollout
    waits = sentences(progress.waiting_for)
    if facts.cluster.metadata.deleting:
        yield "Deleting", waits or (f"{progress.deleting} stops" if progress.deleting else "")
    if facts.rolling:
        step = f"revision {rollout.target}: {rollout.units_done} of {rollout.units} units serve"
        yield "RollingOut", sentences((step, waits))
    if progress.draining:
        yield "Draining", sentences((f"{listing(progress.draining)} moves its blocks away", waits))
    if progress.stage is not None:
        yield "Starting", waits
    if waits:
        yield "Waiting", waits
    if facts.changing:
        yield "Changing", _changing(facts)


def _lacks(facts: Facts, judged: Mapping[str, Judgement]) -> Iterator[_Words]:
    """What keeps the cluster from being ready."""
    progress = facts.progress
    if facts.cluster.metadata.deleting:
        yield "Deleting", "the object is being deleted"
    needed = NEEDED if facts.idle else (*NEEDED, "Available")
    yield from ((name, judged[name].message) for name in needed if not judged[name].holds)
    if progress.conflicts:
        yield "Conflict", _conflicts(facts)
    if old := _outdated(facts):
        yield "Outdated", f"{listing([pod.name for pod in old])} not of the newest form yet"
    if facts.changing:
        yield "Outdated", _changing(facts)
    if facts.rolling or progress.stage is not None or progress.waiting_for:
        yield "Progressing", judged["Progressing"].message


def _losses(facts: Facts, judged: Mapping[str, Judgement]) -> Iterator[_Words]:
    """What is missing. Before anything served, only what time alone does not bring."""
    troubled = [pod for tally in facts.tallies if not tally.complete for pod in tally.troubled]
    if facts.progress.conflicts:
        yield "Conflict", _conflicts(facts)
    if broken := [pod for pod in troubled if pod.failure]:
        yield "PodFailed", listing([blocker(pod) for pod in broken])
    if not facts.established:
        return
    needed = ("PortsAllocated", "CoordinationReady", "MasterLeaderElected", *(() if facts.idle else ("Available",)))
    yield from ((name, judged[name].message) for name in needed if not judged[name].holds)
    # Loading weights may take longer than a minute; while a rollout replaces engines, that is no loss.
    if waits := [pod for pod in troubled if not (facts.rolling and pod.component is Component.ENGINE)]:
        yield "PodWaits", listing([blocker(pod) for pod in waits])
    if lost := [pod for tally in facts.pools if not tally.complete for pod in tally.unmounted]:
        yield "SegmentMissing", f"{listing([pod.name for pod in lost])} not known to the leading master"


def _conflicts(facts: Facts) -> str:
    found = [f"{ref} is not ours ({known})" for ref, known in sorted(facts.progress.conflicts.items())]
    return f"{listing(found)}; delete or rename it, or give this cluster another name"


def _changing(facts: Facts) -> str:
    return f"{listing([str(ref) for ref in facts.changing])} not in the newest form yet"


def _outdated(facts: Facts) -> list[ObservedPod]:
    """Pods of an old template or revision, and those that should not be there any more."""
    target = facts.progress.rollout.target
    return [
        pod
        for pod in facts.observed.pods
        if not pod.up_to_date or (pod.component is Component.ENGINE and target and pod.revision != target)
    ]
