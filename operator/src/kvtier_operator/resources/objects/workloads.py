"""StatefulSets, their Services, ConfigMaps and disruption budgets. Pure; called by the builders of components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Manifest
from kvtier_operator.resources.objects.manifests import manifest
from kvtier_operator.resources.objects.pods import Pod, pod_template
from kvtier_operator.resources.objects.slots import Slot, slot_files


@dataclass(frozen=True, slots=True)
class PodSet:
    """A StatefulSet.

    Attributes:
        name: its own, and that of its ConfigMap if it has one.
        service: its headless Service.
        replicas: wanted pods.
        pod: of each.
        annotations: of the set.
        labels: of the set.
        rolling: Kubernetes replaces outdated pods by itself, one by one; else the operator deletes them in its order.
        claims: volumes that outlive a pod.
    """

    name: str
    service: str
    replicas: int
    pod: Pod
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    rolling: bool = False
    claims: tuple[Mapping[str, Any], ...] = ()


def stateful_set(cluster: KVCacheCluster, wanted: PodSet) -> Manifest:
    """The StatefulSet; all its pods start and stop at once, because none of them waits for another."""
    spec: dict[str, Any] = {
        "serviceName": wanted.service,
        "replicas": wanted.replicas,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate" if wanted.rolling else "OnDelete"},
        "selector": {"matchLabels": dict(wanted.pod.selector)},
        "template": pod_template(cluster, wanted.pod),
    }
    if wanted.claims:
        # What a cache remembers is worth nothing once the cluster is gone.
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
        spec["volumeClaimTemplates"] = [dict(claim) for claim in wanted.claims]
    own = dict(wanted.labels) | dict(wanted.pod.selector)
    return manifest(cluster, "StatefulSet", wanted.name, {"spec": spec}, own=own, annotations=wanted.annotations)


def slot_config(cluster: KVCacheCluster, wanted: PodSet, slots: Iterable[Slot]) -> Manifest:
    """The ConfigMap with what differs between the set's pods."""
    files = slot_files(slots)
    own = dict(wanted.labels) | dict(wanted.pod.selector)
    return manifest(cluster, "ConfigMap", wanted.name, {"data": files} if files else {}, own=own)


def headless_service(
    cluster: KVCacheCluster, name: str, selected: Mapping[str, str], ports: Mapping[str, tuple[int, str]]
) -> Manifest:
    """A Service that gives every pod its name, ready or not: peers look for one another before they are ready.

    Args:
        cluster: its owner.
        name: its name.
        selected: labels of the pods.
        ports: number and name of the container's port, by name.
    """
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, **_service(selected, ports)}
    return manifest(cluster, "Service", name, {"spec": spec}, own=selected)


def service(
    cluster: KVCacheCluster,
    name: str,
    selected: Mapping[str, str],
    ports: Mapping[str, tuple[int, str]],
    own: Mapping[str, str],
) -> Manifest:
    """A Service with an address of its own; arguments as in `headless_service`, ``own`` are its labels."""
    return manifest(cluster, "Service", name, {"spec": _service(selected, ports)}, own=own)


def budget(cluster: KVCacheCluster, name: str, selected: Mapping[str, str], limit: Mapping[str, int]) -> Manifest:
    """A PodDisruptionBudget; ``limit`` is ``minAvailable`` or ``maxUnavailable``."""
    spec = {"selector": {"matchLabels": dict(selected)}, **limit}
    return manifest(cluster, "PodDisruptionBudget", name, {"spec": spec}, own=selected)


def _service(selected: Mapping[str, str], ports: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    return {
        "selector": dict(selected),
        "ports": [{"name": name, "port": number, "targetPort": target} for name, (number, target) in ports.items()],
    }
