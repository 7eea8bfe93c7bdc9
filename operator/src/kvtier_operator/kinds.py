"""The kinds of objects that the operator reads and writes, and their URLs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvtier_operator.api import API_VERSION, KIND, PLURAL


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of namespaced object.

    Attributes:
        api: group and version, as in ``apiVersion``.
    """

    name: str
    api: str
    plural: str

    @property
    def root(self) -> str:
        """URL path of the group and version, where the server says which kinds it has."""
        return f"/apis/{self.api}" if "/" in self.api else f"/api/{self.api}"

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of one object, of a namespace's collection, or of all namespaces' collection."""
        parts = [self.root]
        if namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


MONITORING_API: Final = "monitoring.coreos.com/v1"

CLUSTER_KIND: Final = Kind(KIND, API_VERSION, PLURAL)
POD_KIND: Final = Kind("Pod", "v1", "pods")
EVENT_KIND: Final = Kind("Event", "v1", "events")
LEASE_KIND: Final = Kind("Lease", "coordination.k8s.io/v1", "leases")
CONFIG_MAP_KIND: Final = Kind("ConfigMap", "v1", "configmaps")

CHILD_KINDS: Final = (
    Kind("StatefulSet", "apps/v1", "statefulsets"),
    Kind("Deployment", "apps/v1", "deployments"),
    Kind("Service", "v1", "services"),
    CONFIG_MAP_KIND,
    Kind("ServiceAccount", "v1", "serviceaccounts"),
    Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
)
"""Every cluster of Kubernetes has them."""

OPTIONAL_KINDS: Final = (
    Kind("ServiceMonitor", MONITORING_API, "servicemonitors"),
    Kind("PrometheusRule", MONITORING_API, "prometheusrules"),
)
"""They exist where the Prometheus operator is installed."""

KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {kind.name: kind for kind in (CLUSTER_KIND, POD_KIND, EVENT_KIND, LEASE_KIND, *CHILD_KINDS, *OPTIONAL_KINDS)}
)
"""By name."""
