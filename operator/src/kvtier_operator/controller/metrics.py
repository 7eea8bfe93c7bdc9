"""What the operator counts of itself, in a registry of its own. Owned by the event loop; a scrape reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from kvtier_operator.controller.index import ClusterKey

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _nothing() -> float:
    return 0.0


@dataclass(slots=True)
class Readings:
    """What is read when scraped; filled in by whoever has it."""

    queue_depth: Callable[[], float] = _nothing
    queue_age_s: Callable[[], float] = _nothing
    clusters: Callable[[], float] = _nothing
    watch_silence_s: Callable[[], float] = _nothing
    loop_lag_s: Callable[[], float] = _nothing
    leading: Callable[[], float] = _nothing


@dataclass(slots=True, eq=False)
class ConditionGauge:
    """Conditions of all clusters, kept as small as a thousand clusters want."""

    _by_cluster: dict[ClusterKey, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def set(self, key: ClusterKey, status: Mapping[str, Any]) -> None:
        """Take over the conditions of a status."""
        self._by_cluster[key] = tuple((item["type"], item["status"]) for item in status.get("conditions") or ())

    def forget(self, key: ClusterKey) -> None:
        """The cluster is gone."""
        self._by_cluster.pop(key, None)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        family = GaugeMetricFamily(
            "kvtier_operator_cluster_condition",
            "Condition of a KVCacheCluster: 1 True, 0 False, -1 Unknown.",
            labels=("namespace", "name", "type"),
        )
        values = {"True": 1.0, "False": 0.0}
        for key, conditions in self._by_cluster.items():
            for kind, status in conditions:
                family.add_metric((key.namespace, key.name, kind), values.get(status, -1.0))
        yield family


class OperatorMetrics:
    """All of the operator's metrics.

    Attributes:
        registry: what /metrics shows.
        readings: asked at each scrape.
        conditions: of the clusters.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.readings = Readings()
        self.conditions = ConditionGauge()
        self.reconcile_s = Histogram(
            "kvtier_operator_reconcile_seconds",
            "Time of one pass, by outcome: unchanged, changed, invalid, conflict, gone, interrupted, error.",
            ("outcome",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.api_requests = self._counter(
            "api_requests",
            "Requests to the Kubernetes API, watches apart; code 0 = no answer.",
            "verb",
            "resource",
            "code",
        )
        self.actions = self._counter("actions", "Actions of plans carried out, by kind of action.", "action")
        self.applies = self._counter("applies", "Objects applied, by kind.", "kind")
        self.drift_repaired = self._counter(
            "drift_repaired", "Objects that others had changed, set right, by kind.", "kind"
        )
        self.status_writes = self._counter("status_writes", "Statuses written because they differed.")
        self.events = self._counter("events", "Events written on clusters, by reason.", "reason")
        self.informer_restarts = self._counter("informer_restarts", "Times the watches had to be set up again.")
        self.strays = self._counter(
            "index_repairs", "Objects that a list showed and the watch had not, by kind.", "kind"
        )
        self._gauge("leader", "1 while this operator acts, 0 while it stands by.", "leading")
        self._gauge("queue_depth", "Clusters that wait for a worker.", "queue_depth")
        self._gauge("queue_oldest_age_seconds", "For how long the first of them has waited.", "queue_age_s")
        self._gauge("clusters", "KVCacheClusters known.", "clusters")
        self._gauge("watch_silence_seconds", "Since the event loop of the watches last turned.", "watch_silence_s")
        self._gauge("loop_lag_seconds", "By how much the event loop was late when last measured.", "loop_lag_s")
        self.registry.register(self.conditions)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvtier_operator_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, reading: str) -> None:
        gauge = Gauge(f"kvtier_operator_{name}", text, registry=self.registry)
        gauge.set_function(lambda: float(getattr(self.readings, reading)()))
