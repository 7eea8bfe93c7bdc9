"""What the spec does not ask for any more: objects of ours to be scaled down and deleted, in order. Pure; see `plan`.

A workload that is not wanted goes after those that depend on it, and its Services, settings and budgets go when its
last pod has. Sets of former revisions are the business of `engines`, storage nodes of a store in use that of `stores`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import WORKLOAD_KINDS, Component, ObjectRef, Observed, ObservedObject
from kvtier_operator.planning.actions import Action, Delete, Scale
from kvtier_operator.planning.engines import EnginesPlan
from kvtier_operator.planning.workloads import component_of, group_of, is_ours


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What to do about them, and what they wait for."""

    actions: tuple[Action, ...] = ()
    waiting: str = ""


def clear_leftovers(
    cluster: KVCacheCluster,
    observed: Observed,
    wanted: Collection[ObjectRef],
    engines: EnginesPlan,
    *,
    settled: bool,
) -> Leftovers:
    """Take away what nobody wants.

    Args:
        cluster: the owner.
        observed: as it is.
        wanted: every object that should exist, also those whose time has not come.
        engines: what happens to the engines meanwhile.
        settled: nothing is being applied; before that a workload may still be in use by others as they were.
    """
    actions: list[Action] = []
    waiting = ""
    ledger = ObjectRef("ConfigMap", names.ledger_config(cluster.name))
    for found in sorted(observed.objects.values(), key=lambda item: item.ref):
        if found.ref in wanted or found.ref == ledger or found.deleting or not is_ours(cluster, found):
            continue
        component = component_of(found)
        if component is Component.ENGINE and (labels.REVISION in found.labels or not engines.rendered):
            continue
        why = _why_it_stays(cluster, observed, found, component, engines)
        if not settled and found.ref.kind in WORKLOAD_KINDS:
            why = why or f"{found.ref} goes after the others have changed"
        if why:
            waiting = waiting or why
        elif found.ref.kind in WORKLOAD_KINDS and found.replicas:
            actions.append(Scale(found.ref, found.uid, 0, "the spec does not ask for it any more"))
        elif _has_pods(cluster, observed, found, component, wanted):
            waiting = waiting or f"{found.ref} goes when its pods have gone"
        else:
            actions.append(Delete(found.ref, found.uid, "the spec does not ask for it any more"))
    return Leftovers(tuple(actions), waiting)


def _why_it_stays(
    cluster: KVCacheCluster,
    observed: Observed,
    found: ObservedObject,
    component: Component | None,
    engines: EnginesPlan,
) -> str:
    """What still depends on a workload that is not wanted; empty = nothing."""
    if found.ref.kind not in WORKLOAD_KINDS or component is None:
        return ""
    if component is Component.STORE and cluster.uses_store:
        return f"{found.ref} is emptied node by node" if found.replicas else ""
    if engines.progress.running:
        return f"{found.ref} serves until revision {engines.progress.current} has left"
    users = {Component.MASTER: Component.STORE, Component.ETCD: Component.MASTER}.get(component)
    for pod in observed.pods_of(users) if users else ():
        if component is Component.MASTER or not pod.up_to_date or not cluster.uses_store:
            return f"{found.ref} serves until {pod.name} has left"
    return ""


def _has_pods(
    cluster: KVCacheCluster,
    observed: Observed,
    found: ObservedObject,
    component: Component | None,
    wanted: Collection[ObjectRef],
) -> bool:
    """True while a pod may need the object, because its workload is on its way out."""
    if component is None:
        return False
    group = group_of(found)
    pods = observed.pods_of(component, group)
    if component is Component.ENGINE:
        # Objects of a role serve all its revisions; in a role that stays they are replaced, not missed.
        return bool(pods) and group not in {role.name for role in cluster.roles}
    stays = any(
        item.ref in wanted
        for item in observed.objects.values()
        if item.ref.kind in WORKLOAD_KINDS and component_of(item) is component and group_of(item) == group
    )
    return bool(pods) and not stays
