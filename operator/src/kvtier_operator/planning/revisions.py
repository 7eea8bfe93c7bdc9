"""The revisions of the engines as they exist, and the lane for the next one. Pure; called by `engines`.

A lane belongs to one revision at a time, so at most two exist: the one that serves, and the next one or the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.units import Counts
from kvtier_operator.planning.wants import LANES
from kvtier_operator.planning.workloads import component_of, group_of, is_ours


@dataclass(frozen=True, slots=True)
class EngineRevision:
    """What exists of one revision.

    Attributes:
        lane: of its sets; empty while it has none.
        objects: everything that only this revision needs.
        pods: also those that are terminating.
    """

    name: str
    lane: str = ""
    objects: tuple[ObservedObject, ...] = ()
    pods: tuple[ObservedPod, ...] = ()

    @property
    def sets(self) -> Mapping[str, ObservedObject]:
        """Its StatefulSets by role."""
        return {group_of(item): item for item in self.objects if item.ref.kind == "StatefulSet"}

    @property
    def given(self) -> Counts:
        """Pods that it has been given, by role."""
        return {role: found.replicas for role, found in self.sets.items()}

    @property
    def ready(self) -> Counts:
        """Pods that are ready, by role; those that are about to leave do not count."""
        given = self.given
        return Counter(pod.group for pod in self.pods if pod.ready and pod.slot < given.get(pod.group, 0))

    @property
    def failed(self) -> tuple[ObservedPod, ...]:
        """Pods that cannot become ready by themselves."""
        return tuple(pod for pod in self.pods if pod.failure and not pod.deleting)

    @property
    def busy(self) -> bool:
        """True while it has pods or may make some."""
        return bool(self.pods) or any(self.given.values())


def engine_revisions(cluster: KVCacheCluster, observed: Observed) -> Mapping[str, EngineRevision]:
    """Every revision that has an object or a pod, by name."""
    objects: dict[str, list[ObservedObject]] = {}
    for item in observed.objects.values():
        name = item.labels.get(labels.REVISION, "")
        if name and component_of(item) is Component.ENGINE and is_ours(cluster, item) and not item.deleting:
            objects.setdefault(name, []).append(item)
    pods: dict[str, list[ObservedPod]] = {}
    for pod in observed.pods_of(Component.ENGINE):
        pods.setdefault(pod.revision, []).append(pod)
    return {
        name: EngineRevision(
            name,
            next((item.labels[labels.LANE] for item in objects.get(name, ()) if labels.LANE in item.labels), ""),
            tuple(sorted(objects.get(name, ()), key=lambda item: item.ref)),
            tuple(pods.get(name, ())),
        )
        for name in sorted({*objects, *pods})
    }


def free_lane(others: Iterable[EngineRevision], kept: str) -> str:
    """A lane for a revision that has none yet: rather one without any, never a busy one's; empty = none is free.

    Args:
        others: all other revisions.
        kept: the one that should stay as history, if another lane will do.
    """
    others = list(others)
    for taken in (others, [one for one in others if one.busy or one.name == kept], [one for one in others if one.busy]):
        lanes = {one.lane for one in taken}
        if free := next((lane for lane in LANES if lane not in lanes), ""):
            return free
    return ""
