"""The parts of a status that say what runs: leader, counts, revisions, model. Pure; called by `document`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, Role
from kvtier_operator.api.units import timestamp
from kvtier_operator.observed import Component, MasterRole, Observed
from kvtier_operator.planning.remembered import last_revision
from kvtier_operator.planning.revision import effective_model_id
from kvtier_operator.planning.wants import owner_of
from kvtier_operator.planning.workloads import is_ours
from kvtier_operator.status.facts import Facts
from kvtier_operator.status.tally import Tally, shares

_HISTORY = 10

Section = dict[str, Any]


def sections_of(facts: Facts) -> Section:
    """Everything but conditions, phase and generation; parts that a cluster does not have are absent."""
    status: Section = {
        "engines": shares(facts.roles),
        "roles": [_role(facts, role, tally) for role, tally in zip(facts.cluster.roles, facts.roles, strict=True)],
        "revisions": _revisions(facts),
        "model": _model(facts.cluster, facts.observed),
    }
    if facts.cluster.uses_store:
        status |= {"masters": _masters(facts), "store": _store(facts)}
        if facts.leader is not None:
            status["leader"] = _leader(facts)
        if facts.cluster.coordination.uses_etcd:
            status["etcd"] = _etcd(facts)
    if facts.cluster.router is not None:
        status["router"] = {"desired": facts.router.desired, "ready": facts.router.ready}
    return status


def _leader(facts: Facts) -> Section:
    assert facts.leader is not None
    name, state = facts.leader.name, facts.observed.masters.get(facts.leader.name)
    leader: Section = {"pod": name}
    if state is not None:
        leader |= {"address": state.address, "viewVersion": state.view_version}
    before = facts.observed.status.get("leader") or {}
    same = all(before.get(part) == leader.get(part) for part in ("pod", "viewVersion"))
    return leader | {"since": (before.get("since") if same else "") or timestamp(facts.observed.now)}


def _masters(facts: Facts) -> Section:
    states = facts.observed.masters.values()
    caught_up = sum(state.role is MasterRole.STANDBY and state.caught_up for state in states)
    return {"desired": facts.masters.desired, "up": facts.masters.ready, "standbyCaughtUp": caught_up}


def _etcd(facts: Facts) -> Section:
    if facts.cluster.coordination.managed is None:
        return {"mode": "External"}
    return {"mode": "Managed", "desired": facts.etcd.desired, "ready": facts.etcd.ready}


def _store(facts: Facts) -> Section:
    pools = zip(facts.cluster.pools, facts.pools, strict=True)
    return {"ready": shares(facts.pools), "pools": [_pool(facts, pool.name, tally) for pool, tally in pools]}


def _pool(facts: Facts, name: str, tally: Tally) -> Section:
    pool: Section = {"name": name, "desired": tally.desired, "ready": tally.ready}
    members = {pod.name for pod in facts.observed.pods_of(Component.STORE, name)}
    leaving = sorted(set(facts.progress.draining) & members)
    if leaving:
        pool["draining"] = [_drain(facts.observed, pod) for pod in leaving]
    return pool


def _drain(observed: Observed, pod: str) -> Section:
    state = observed.drains.get(pod)
    if state is None:
        return {"pod": pod}
    return {"pod": pod, "jobID": state.job, "phase": str(state.phase), "detail": state.detail}


def _role(facts: Facts, role: Role, tally: Tally) -> Section:
    target = facts.progress.rollout.target
    pods = facts.observed.pods_of(Component.ENGINE, role.name)
    updated = sum(pod.ready and pod.up_to_date and pod.revision == target for pod in pods)
    status: Section = {
        "name": role.name,
        "revision": target,
        "desired": tally.desired,
        "ready": tally.ready,
        "updated": updated,
    }
    if lane := _lane(facts, role.name, target):
        status |= {"lane": lane, "ports": _ports(facts, role.name, lane)}
    return status


def _lane(facts: Facts, role: str, revision: str) -> str:
    """Of the role's set in this revision; empty while it has none."""
    wanted: Mapping[str, str] = {labels.ROLE: role, labels.REVISION: revision}
    for found in facts.observed.objects.values():
        if found.ref.kind == "StatefulSet" and is_ours(facts.cluster, found) and wanted.items() <= found.labels.items():
            return found.labels.get(labels.LANE, "")
    return ""


def _ports(facts: Facts, role: str, lane: str) -> str:
    """First and last port of the role's blocks."""
    owner, entries = owner_of(facts.cluster), facts.observed.ledger.entries
    blocks = [
        entry.block
        for key, entry in entries.items()
        if (key.cluster, key.group, key.lane) == (owner, role, lane) and entry.released_at is None
    ]
    return f"{min(one.start for one in blocks)}-{max(one.stop for one in blocks) - 1}" if blocks else ""


def _revisions(facts: Facts) -> Section:
    """The one that serves; when none does for a moment, the one that served last."""
    rollout = facts.progress.rollout
    current = facts.served_by or last_revision(facts.observed)
    revisions: Section = {"current": current}
    if rollout.target and rollout.target != current:
        revisions["updating"] = rollout.target
    if rollout.previous:
        revisions["previous"] = [rollout.previous]
    return revisions


def _model(cluster: KVCacheCluster, observed: Observed) -> Section:
    """The namespace of keys, and those before it, whose blocks are out of reach."""
    now = effective_model_id(cluster.model)
    before = observed.status.get("model") or {}
    history = dict.fromkeys((before.get("effectiveID") or "", *(before.get("previousIDs") or ())))
    previous = [one for one in history if one and one != now][:_HISTORY]
    return {"effectiveID": now} | ({"previousIDs": previous} if previous else {})
