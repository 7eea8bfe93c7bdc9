"""The workloads of a cluster as they exist, found by their labels. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import WORKLOAD_KINDS, Component, Observed, ObservedObject


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet or Deployment of ours.

    Attributes:
        group: its role or pool; empty for others.
        revision, lane: of engines.
    """

    found: ObservedObject
    component: Component
    group: str
    revision: str
    lane: str


def is_ours(cluster: KVCacheCluster, found: ObservedObject) -> bool:
    """True for objects that the cluster owns; everybody else's are never touched."""
    return bool(found.owner_uid) and found.owner_uid == cluster.metadata.uid


def component_of(found: ObservedObject) -> Component | None:
    """What an object is for; None for those that serve the cluster as a whole."""
    name = found.labels.get(labels.COMPONENT, "")
    return Component(name) if name in set(Component) else None


def group_of(found: ObservedObject) -> str:
    """Role or pool of an object; empty for others."""
    return found.labels.get(labels.ROLE) or found.labels.get(labels.POOL) or ""


def workloads_of(cluster: KVCacheCluster, observed: Observed, component: Component) -> tuple[Workload, ...]:
    """Workloads of a component that belong to the cluster and are not being deleted, by name."""
    found = [
        Workload(
            item, component, group_of(item), item.labels.get(labels.REVISION, ""), item.labels.get(labels.LANE, "")
        )
        for item in observed.objects.values()
        if item.ref.kind in WORKLOAD_KINDS and component_of(item) is component
    ]
    ours = [item for item in found if is_ours(cluster, item.found) and not item.found.deleting]
    return tuple(sorted(ours, key=lambda item: item.found.ref))
