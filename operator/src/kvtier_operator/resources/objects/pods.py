"""Pod templates: one container, the volumes that every pod has, where it may run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier_operator.api import KVCacheCluster, PodOptions
from kvtier_operator.api.schema.pod import OWNED_VOLUME_PREFIX
from kvtier_operator.resources.objects.containers import (
    SCRATCH_DIR,
    USER,
    Container,
    mount,
    pod_field,
    render_before,
    render_container,
)
from kvtier_operator.resources.objects.manifests import child_labels
from kvtier_operator.resources.objects.slots import CONFIG_DIR, SLOT_VARIABLE, slot_env

_CONFIG, _SCRATCH = f"{OWNED_VOLUME_PREFIX}config", f"{OWNED_VOLUME_PREFIX}tmp"
_HOSTNAME, _ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class Pod:
    """What a component decides about its pods.

    Attributes:
        container: the only one.
        options: the user's.
        selector: labels of the set's pods.
        alike: labels of the pods from which it keeps away; on the host network never on the same node, because they
            share ports.
        grace_s: from SIGTERM to SIGKILL.
        labels: beyond the selector.
        annotations: of the pod.
        config: ConfigMap with the slots' files; empty = none.
        volumes: beyond the scratch folder and the ConfigMap.
        host_network: it uses its node's addresses.
    """

    container: Container
    options: PodOptions
    selector: Mapping[str, str]
    alike: Mapping[str, str]
    grace_s: int
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    volumes: tuple[Mapping[str, Any], ...] = ()
    host_network: bool = False


def pod_template(cluster: KVCacheCluster, pod: Pod) -> dict[str, Any]:
    """``template`` of a StatefulSet or Deployment."""
    options = pod.options
    metadata: dict[str, Any] = {
        "labels": dict(options.labels) | child_labels(cluster) | dict(pod.labels) | dict(pod.selector)
    }
    if annotations := dict(options.annotations) | dict(pod.annotations):
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": _spec(cluster, pod)}


def _spec(cluster: KVCacheCluster, pod: Pod) -> dict[str, Any]:
    options, container = pod.options, _furnished(pod)
    spec: dict[str, Any] = {
        "serviceAccountName": options.service_account or cluster.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_s,
        "securityContext": _security(),
        "affinity": _affinity(pod),
        "topologySpreadConstraints": [_spread(pod)],
        "containers": [render_container(container, options)],
        "volumes": [*_volumes(pod), *(dict(volume) for volume in options.volumes)],
    }
    if pod.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    optional = {
        "initContainers": render_before(container, options),
        "imagePullSecrets": [{"name": name} for name in cluster.images.pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": [dict(toleration) for toleration in options.tolerations],
        "priorityClassName": options.priority_class,
        "runtimeClassName": options.runtime_class,
    }
    return spec | {name: value for name, value in optional.items() if value}


def _security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _furnished(pod: Pod) -> Container:
    """The container with what every pod has: its identity, a scratch folder, the slots' files."""
    env: dict[str, Any] = {
        "POD_NAME": pod_field("metadata.name"),
        "POD_IP": pod_field("status.podIP"),
        # Nobody else's home is writable for a user whom the image may not know.
        "HOME": SCRATCH_DIR,
    }
    mounts = [mount(_SCRATCH, SCRATCH_DIR)]
    if pod.config:
        env[SLOT_VARIABLE] = slot_env()
        mounts.append(mount(_CONFIG, CONFIG_DIR, read_only=True))
    container = pod.container
    return replace(container, env=env | dict(container.env), mounts=(*mounts, *container.mounts))


def _volumes(pod: Pod) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": _SCRATCH, "emptyDir": {}}]
    if pod.config:
        volumes.append({"name": _CONFIG, "configMap": {"name": pod.config}})
    return [*volumes, *(dict(volume) for volume in pod.volumes)]


def _affinity(pod: Pod) -> dict[str, Any]:
    """The user's, and ours: a node that fails should take one pod of a kind with it."""
    affinity = {name: dict(value) for name, value in pod.options.affinity.items()}
    anti = affinity.setdefault("podAntiAffinity", {})
    term: dict[str, Any] = {"labelSelector": {"matchLabels": dict(pod.alike)}, "topologyKey": _HOSTNAME}
    strength = "required" if pod.host_network else "preferred"
    key = f"{strength}DuringSchedulingIgnoredDuringExecution"
    anti[key] = [*anti.get(key, ()), term if pod.host_network else {"weight": 100, "podAffinityTerm": term}]
    return affinity


def _spread(pod: Pod) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": _ZONE,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(pod.alike)},
    }
