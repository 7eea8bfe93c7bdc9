"""What a KVCacheCluster says of its pods: options of every component, and images. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT_IMAGE = "kvtier-worker:0.1.0"
DEFAULT_ETCD_IMAGE = "registry.k8s.io/etcd:3.6.5-0"


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What a component's pods get beyond what the operator decides. Kubernetes only.

    Attributes:
        resources: as in a container: ``requests``, ``limits``.
        node_selector: labels of nodes.
        tolerations: as in a pod.
        affinity: as in a pod; the operator's own anti-affinity is added.
        annotations, labels: added to the pod; names of ours are refused.
        env: added to the container; names that the operator sets are refused.
        priority_class: name of a PriorityClass.
        runtime_class: name of a RuntimeClass.
        service_account: name of a ServiceAccount instead of the operator's.
        volumes, volume_mounts: as in a pod, for weights, certificates and the like.
    """

    resources: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    priority_class: str = ""
    runtime_class: str = ""
    service_account: str = ""
    volumes: tuple[Mapping[str, Any], ...] = ()
    volume_mounts: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Images:
    """Images of the pods; an empty one is ``default``.

    Attributes:
        default: kvtier's worker image: it has engine, storage node and master.
        pull_secrets: names of Secrets.
    """

    default: str = DEFAULT_IMAGE
    engine: str = ""
    mooncake: str = ""
    router: str = ""
    etcd: str = DEFAULT_ETCD_IMAGE
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
