"""What the Prometheus operator should scrape and alert about. Pure.

Only where its kinds exist and the manifest does not say Never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtier_operator import labels, names
from kvtier_operator.api import Dialect, KVCacheCluster, Monitoring
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.resources.objects.engines import METRICS_PORT, XLLM_METRICS_PORT
from kvtier_operator.resources.objects.manifests import manifest

_MONITOR, _RULE = "ServiceMonitor", "PrometheusRule"
_COPIED = (labels.CLUSTER, labels.COMPONENT, labels.POOL, labels.ROLE)
"""Labels of a Service that its metrics get, so that rules and people can tell clusters apart."""
_XLLM_METRICS_PATH = "/brpc_metrics"


@dataclass(frozen=True, slots=True)
class _Alert:
    """One alerting rule; ``since`` is how long ``query`` must hold."""

    name: str
    query: str
    since: str
    severity: str
    summary: str
    description: str

    def render(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.query,
            "for": self.since,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def monitoring_objects(cluster: KVCacheCluster, kinds: frozenset[str]) -> Iterator[tuple[Stage, Manifest]]:
    """The ServiceMonitor and the PrometheusRule; ``kinds`` are those that exist here of the optional ones."""
    wanted = cluster.observability
    name = names.monitor(cluster.name)
    if _MONITOR in kinds and wanted.service_monitor is Monitoring.AUTO:
        yield Stage.MONITORING, manifest(cluster, _MONITOR, name, {"spec": _monitor(cluster)}, own=wanted.labels)
    groups = [{"name": f"{cluster.metadata.namespace}.{name}", "rules": [alert.render() for alert in _alerts(cluster)]}]
    if _RULE in kinds and wanted.alerts is Monitoring.AUTO and groups[0]["rules"]:
        yield Stage.MONITORING, manifest(cluster, _RULE, name, {"spec": {"groups": groups}}, own=wanted.labels)


def _monitor(cluster: KVCacheCluster) -> dict[str, Any]:
    """Headless Services only have these ports: pods are scraped before they are ready, and none of them twice."""
    endpoints = [{"port": METRICS_PORT}]
    if cluster.dialect is Dialect.XLLM:
        endpoints.append({"port": XLLM_METRICS_PORT, "path": _XLLM_METRICS_PATH})
    return {
        "selector": {"matchLabels": {labels.CLUSTER: cluster.name}},
        "endpoints": endpoints,
        "targetLabels": list(_COPIED),
    }


def _alerts(cluster: KVCacheCluster) -> Iterator[_Alert]:
    own = f'namespace="{cluster.metadata.namespace}",kvtier_dev_cluster="{cluster.name}"'
    if cluster.uses_store:
        yield from _store_alerts(cluster, own)
    if cluster.dialect is Dialect.KVTIER:
        yield from _engine_alerts(cluster, own)


def _store_alerts(cluster: KVCacheCluster, own: str) -> Iterator[_Alert]:
    yield _Alert(
        "KVTierLeaderMissing",
        f"sum(master_active_clients{{{own}}}) == 0",
        "1m",
        "critical",
        f"No master of KVCacheCluster {cluster.name} serves any client",
        "Engines compute what they would have read from the store. See the condition MasterLeaderElected.",
    )
    yield _Alert(
        "KVTierStoreNodeDegraded",
        f'kvtier_store_node_state{{{own},kvtier_store_node_state="degraded"}} == 1',
        "5m",
        "warning",
        "Storage node {{ $labels.pod }} cannot read its own test object",
        "Its objects count as misses. See its log for the reason, and the master's.",
    )


def _engine_alerts(cluster: KVCacheCluster, own: str) -> Iterator[_Alert]:
    hits, prompts = f"prompt_tokens_cached_total{{{own}}}", f"prompt_tokens_total{{{own}}}"
    now = f"sum(rate({hits}[15m])) / sum(rate({prompts}[15m]))"
    before = f"sum(rate({hits}[6h] offset 1h)) / sum(rate({prompts}[6h] offset 1h))"
    yield _Alert(
        "KVTierHitRateCollapsed",
        f"({now}) < 0.5 * ({before}) and {before} > 0.1 and sum(rate({prompts}[15m])) > 1",
        "15m",
        "warning",
        f"Prompts of KVCacheCluster {cluster.name} hit its cache half as often as before",
        "Either clients send other prompts, or blocks are gone: a failover without OpLog, a new model id, a lost pool.",
    )
    yield _Alert(
        "KVTierEngineStepsFail",
        f"rate(engine_failed_steps_total{{{own}}}[10m]) > 0",
        "10m",
        "warning",
        "Engine {{ $labels.pod }} drops results of steps",
        "Their requests ended with an error. Its log names the worker and the reason.",
    )
    if cluster.uses_store:
        yield _Alert(
            "KVTierStoreUnreachable",
            f'max by (namespace, pod) (cache_store_state{{{own},state="open"}}) == 1',
            "2m",
            "warning",
            "Engine {{ $labels.pod }} does without the store",
            "Its calls failed, so it computes instead. See the masters, the storage nodes and the network between.",
        )
