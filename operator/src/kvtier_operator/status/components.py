"""Conditions of the single components. Pure; called by `document`."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_operator.api import Durability, Truth
from kvtier_operator.planning.wants import ports_needed
from kvtier_operator.status.conditions import Judgement, failed, held, listing, sentences
from kvtier_operator.status.facts import Facts
from kvtier_operator.status.tally import Tally

_NOT_NEEDED = "NotNeeded"
_NO_STORE = "no role uses the store"


def component_judgements(facts: Facts) -> Iterator[Judgement]:
    """In start order."""
    yield _ports(facts)
    yield _coordination(facts)
    yield _leader(facts)
    yield _durability(facts)
    yield _store(facts)
    yield _roles(facts)
    yield _router(facts)
    yield _rollout(facts)
    yield _drains(facts)
    yield _plaintext(facts)


def _ports(facts: Facts) -> Judgement:
    name, ports, progress = "PortsAllocated", facts.cluster.transport.ports, facts.progress
    if progress.taken_ports:
        message = f"{listing(progress.taken_ports)}; move one of the two"
        return failed(name, "PortTaken", message)
    if progress.exhausted:
        # What the next rollout needs, or it would get stuck, and the webhook refuses less.
        size = max(ports.size + progress.missing_ports, ports_needed(facts.cluster))
        message = (
            f"{listing(progress.exhausted)} do not fit into ports {ports.start} to {ports.stop - 1}; nothing new is "
            f"made; write spec.transport.ports.range.size: {size}, or wait a minute where engines have just left"
        )
        return failed(name, "RangeExhausted", message)
    return held(name, "Allocated")


def _coordination(facts: Facts) -> Judgement:
    name, coordination = "CoordinationReady", facts.cluster.coordination
    if not facts.cluster.uses_store:
        return held(name, _NOT_NEEDED, _NO_STORE)
    if coordination.managed is not None:
        if facts.quorum:
            return held(name, "Quorum", "" if facts.etcd.complete else facts.etcd.words)
        need = f"{coordination.managed.quorum} are needed; rollouts and scale-in stand still"
        return failed(name, "NoQuorum", f"{facts.etcd.words}; {need}")
    if coordination.external:
        return held(name, "External", f"masters elect over {listing(coordination.external)}, which others run")
    return held(name, _NOT_NEEDED, "a single master elects nobody")


def _leader(facts: Facts) -> Judgement:
    name = "MasterLeaderElected"
    if not facts.cluster.uses_store:
        return held(name, _NOT_NEEDED, _NO_STORE)
    if facts.leader is not None:
        return held(name, "Elected", f"{facts.leader.name} leads")
    asks = "; look at the masters' logs" if facts.masters.complete and facts.quorum else ""
    return failed(name, "NoLeader", f"no master leads; {facts.masters.words}{asks}")


def _durability(facts: Facts) -> Judgement:
    name, cluster = "MetadataDurable", facts.cluster
    if not cluster.uses_store:
        return held(name, _NOT_NEEDED, _NO_STORE)
    if cluster.master.durability is Durability.NONE:
        fix = "for metadata that survives, write spec.coordination and spec.master.durability: OpLog"
        return failed(name, "NotDurable", f"the next leader starts with an empty index; {fix}")
    if not facts.quorum:
        return Judgement(name, Truth.UNKNOWN, "NoQuorum", f"the log is in etcd: {facts.etcd.words}")
    managed = cluster.coordination.managed
    if managed is not None and not managed.storage_bytes:
        return held(name, "OpLog", "etcd has no volumes: the log lives as long as a quorum of its pods")
    return held(name, "OpLog")


def _store(facts: Facts) -> Judgement:
    name = "StoreReady"
    if not facts.cluster.uses_store:
        return held(name, _NOT_NEEDED, _NO_STORE)
    if facts.leader is None:
        return failed(name, "NoLeader", "storage nodes serve through a leading master, and there is none")
    return _complete(name, facts.pools, "no storage node is wanted")


def _roles(facts: Facts) -> Judgement:
    return _complete("RolesReady", facts.roles, "no engine is wanted")


def _router(facts: Facts) -> Judgement:
    name = "RouterReady"
    if facts.cluster.router is None:
        return held(name, _NOT_NEEDED, "engines serve requests themselves")
    return _complete(name, (facts.router,), "no router is wanted")


def _complete(name: str, tallies: tuple[Tally, ...], nothing: str) -> Judgement:
    """True when every group is complete."""
    if not any(one.desired for one in tallies):
        return held(name, "ScaledToZero", nothing)
    lacking = [one for one in tallies if not one.complete]
    if not lacking:
        return held(name, "AllServe")
    pods = [pod for one in lacking for pod in one.troubled]
    reason = "PodFailed" if any(pod.failure for pod in pods) else "PodWaits" if pods else "Starting"
    if reason == "Starting" and any(one.unmounted for one in lacking):
        reason = "SegmentMissing"
    return failed(name, reason, sentences(one.words for one in lacking))


def _rollout(facts: Facts) -> Judgement:
    name, rollout = "RolloutHalted", facts.progress.rollout
    if not rollout.halted:
        return failed(name, "NotHalted")
    back = f", or write the spec of revision {rollout.current} again" if rollout.current != rollout.target else ""
    return held(name, "PodFailed", f"{rollout.halted}; mend the spec{back}: the next change goes on")


def _drains(facts: Facts) -> Judgement:
    name, blocked = "DrainBlocked", facts.progress.blocked_drains
    if not blocked:
        return failed(name, "NotBlocked")
    return held(name, "DrainStopped", sentences(f"{pod}: {why}" for pod, why in sorted(blocked.items())))


def _plaintext(facts: Facts) -> Judgement:
    name, cluster = "TransportPlaintext", facts.cluster
    if not cluster.uses_store:
        return failed(name, _NOT_NEEDED, _NO_STORE)
    guard = (
        "NetworkPolicies of this cluster keep others away, where the network enforces them"
        if cluster.network_policies.enabled
        else "every pod can reach them; write spec.security.networkPolicy.enabled: true"
    )
    text = f"blocks travel over {cluster.transport.protocol} without encryption, masters and nodes trust who connects"
    return held(name, "NoEncryption", f"{text}; {guard}")
