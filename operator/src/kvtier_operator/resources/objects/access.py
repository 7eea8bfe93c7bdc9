"""Who the pods are, and who may reach them: a ServiceAccount without a token, NetworkPolicies. Pure.

Nothing of Mooncake or etcd knows passwords or encryption: these policies are the only lock. They do not hold for pods
on the host network, so there are none then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.resources.objects.manifests import manifest, selector

OPERATOR_LABELS: Final[Mapping[str, str]] = {labels.NAME: "kvtier-operator"}
"""Of the operator's own pods, in whatever namespace."""

_Rule = dict[str, Any]


def access_objects(cluster: KVCacheCluster) -> Iterator[tuple[Stage, Manifest]]:
    """The ServiceAccount, and one NetworkPolicy a component."""
    account = {"automountServiceAccountToken": False}
    yield Stage.FOUNDATION, manifest(cluster, "ServiceAccount", cluster.name, account)
    if not cluster.network_policies.enabled or cluster.transport.host_network:
        return
    for component, rules in _rules(cluster).items():
        yield Stage.FOUNDATION, _policy(cluster, component, rules)


def _rules(cluster: KVCacheCluster) -> Mapping[Component, list[_Rule]]:
    """Ingress rules by component that the cluster has."""
    ours = [{"podSelector": {"matchLabels": {labels.CLUSTER: cluster.name}}}]
    operator = [{"namespaceSelector": {}, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}]
    rules: dict[Component, list[_Rule]] = {
        Component.ENGINE: [_allow(ours), _allow(None, "http")],
    }
    if cluster.etcd_replicas:
        members = [{"podSelector": {"matchLabels": selector(cluster, Component.ETCD)}}]
        rules[Component.ETCD] = [_allow(ours, "client"), _allow(members, "peer")]
    if cluster.uses_store:
        # The masters' metrics and their admin API are one port, so that one is not for everybody.
        scrapers = [_allow(_scrapers(cluster), "admin")] if cluster.network_policies.allow_from else []
        rules[Component.MASTER] = [_allow(ours, "rpc", "admin"), _allow(operator, "admin"), *scrapers]
        rules[Component.STORE] = [_allow(ours), _allow(_scrapers(cluster), "http")]
    if cluster.router:
        rules[Component.ROUTER] = [_allow(ours), _allow(None, "http")]
    return rules


def _scrapers(cluster: KVCacheCluster) -> list[dict[str, Any]] | None:
    """Who may read metrics; None = everybody."""
    allowed = cluster.network_policies.allow_from
    return [{"namespaceSelector": {"matchLabels": dict(allowed)}}] if allowed else None


def _allow(peers: list[dict[str, Any]] | None, *ports: str) -> _Rule:
    """Let peers (None = everybody) reach ports (none named = all)."""
    rule: _Rule = {}
    if peers is not None:
        rule["from"] = peers
    if ports:
        rule["ports"] = [{"port": port} for port in ports]
    return rule


def _policy(cluster: KVCacheCluster, component: Component, rules: list[_Rule]) -> Manifest:
    selected = selector(cluster, component)
    spec = {"podSelector": {"matchLabels": selected}, "policyTypes": ["Ingress"], "ingress": rules}
    name = names.network_policy(cluster.name, component)
    return manifest(cluster, "NetworkPolicy", name, {"spec": spec}, own=selected)
