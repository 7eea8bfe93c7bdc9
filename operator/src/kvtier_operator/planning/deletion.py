"""The finalizer, and the orderly end of a cluster that has it. Pure; called by `plan`.

Each component goes when the pods of those that use it have gone; then the finalizer is taken away and the garbage
collector does the rest. Without the policy Drain there is nothing to do: owner references are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator import labels
from kvtier_operator.api import DeletionPolicy, KVCacheCluster
from kvtier_operator.observed import Component, Observed
from kvtier_operator.planning.actions import Action, Scale, SetFinalizer
from kvtier_operator.planning.pods import blocker
from kvtier_operator.planning.workloads import workloads_of

ORDER = (Component.ROUTER, Component.ENGINE, Component.STORE, Component.MASTER, Component.ETCD)


@dataclass(frozen=True, slots=True)
class Farewell:
    """The next actions of a deletion, the component that has to go now, and the pod that is waited for."""

    actions: tuple[Action, ...] = ()
    component: str = ""
    waiting: str = ""


def finalizer_actions(cluster: KVCacheCluster) -> tuple[SetFinalizer, ...]:
    """Add or remove the finalizer of a living cluster, as its policy asks."""
    wanted = cluster.deletion is DeletionPolicy.DRAIN
    present = labels.FINALIZER in cluster.metadata.finalizers
    return () if wanted is present else (SetFinalizer(present=wanted),)


def bid_farewell(cluster: KVCacheCluster, observed: Observed) -> Farewell:
    """The next step of a cluster that is being deleted."""
    if labels.FINALIZER not in cluster.metadata.finalizers:
        return Farewell()
    if cluster.deletion is DeletionPolicy.IMMEDIATE:
        return Farewell((SetFinalizer(present=False),))
    for component in ORDER:
        running = [item.found for item in workloads_of(cluster, observed, component) if item.found.replicas]
        scales = tuple(Scale(found.ref, found.uid, 0, "the cluster is being deleted") for found in running)
        pods = observed.pods_of(component)
        if scales or pods:
            return Farewell(scales, component, f"{component}: {blocker(pods[0])}" if pods else "")
    return Farewell((SetFinalizer(present=False),))
