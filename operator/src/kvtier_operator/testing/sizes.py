"""Replicas of every workload before and after a plan. Pure; what the referees count with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier_operator import labels
from kvtier_operator.observed import WORKLOAD_KINDS, Component, ObjectRef, Observed
from kvtier_operator.planning.actions import Action, Apply, Delete, Scale


@dataclass(frozen=True, slots=True)
class Sizes:
    """Replicas of every workload before and after a plan, and the labels of each."""

    before: Mapping[ObjectRef, int]
    after: Mapping[ObjectRef, int]
    labels: Mapping[ObjectRef, Mapping[str, str]]

    def of(self, component: Component) -> Iterator[ObjectRef]:
        """Workloads of a component."""
        return (ref for ref in self.after if self.labels[ref].get(labels.COMPONENT) == component)


def sizes_of(observed: Observed, actions: Sequence[Action]) -> Sizes:
    """What these actions make of the sizes."""
    found = {ref: item for ref, item in observed.objects.items() if ref.kind in WORKLOAD_KINDS}
    before = {ref: item.replicas for ref, item in found.items()}
    own = {ref: item.labels for ref, item in found.items()}
    after = dict(before)
    for action in actions:
        if isinstance(action, Apply) and action.ref.kind in WORKLOAD_KINDS:
            after[action.ref] = action.manifest["spec"]["replicas"]
            own[action.ref] = action.manifest["metadata"]["labels"]
        elif isinstance(action, Scale):
            after[action.ref] = action.replicas
        elif isinstance(action, Delete) and action.ref in after:
            after[action.ref] = 0
    return Sizes(before, after, own)
