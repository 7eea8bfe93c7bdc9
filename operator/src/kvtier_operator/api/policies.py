"""How a KVCacheCluster is changed, guarded and watched, as records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator.api.choices import Monitoring, RolloutPolicy


@dataclass(frozen=True, slots=True)
class Rollout:
    """How a new revision of the engines replaces the old one.

    Attributes:
        max_surge: units that may exist beyond the wanted number meanwhile; 0 = replace in place.
    """

    policy: RolloutPolicy = RolloutPolicy.AUTOMATIC
    max_surge: int = 0


@dataclass(frozen=True, slots=True)
class NetworkPolicies:
    """Who may reach the pods.

    Attributes:
        enabled: only the cluster's own components reach master, storage nodes and etcd; everybody reaches the APIs.
        allow_from: namespaces, by label, whose pods may scrape metrics too; empty = all.
    """

    enabled: bool = True
    allow_from: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observability:
    """Objects of the Prometheus operator.

    Attributes:
        labels: added to them, since a Prometheus selects its monitors by label.
    """

    service_monitor: Monitoring = Monitoring.AUTO
    alerts: Monitoring = Monitoring.AUTO
    labels: Mapping[str, str] = field(default_factory=dict)
