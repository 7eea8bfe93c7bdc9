"""Who reaches the pods, and what Prometheus is told."""

from dataclasses import replace
from pathlib import Path

import yaml
from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, Monitoring, NetworkPolicies, Observability, parse
from kvtier_operator.testing.rendered import (
    built,
)

BOTH = frozenset({"ServiceMonitor", "PrometheusRule"})
CLUSTERS = Path(__file__).parents[3] / "golden" / "clusters"


def cluster(name: str = "highly-available") -> KVCacheCluster:
    return parse(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))


def test_the_host_network_has_no_policies_because_none_would_hold() -> None:
    assert "NetworkPolicy" not in {kind for kind, _ in built(cluster("host-network"))}


def test_who_may_reach_whom() -> None:
    objects = built(cluster())
    rules = {name: item["spec"]["ingress"] for (kind, name), item in objects.items() if kind == "NetworkPolicy"}
    assert set(rules) == {"ha-engine", "ha-etcd", "ha-master", "ha-store"}
    ours = [{"podSelector": {"matchLabels": {labels.CLUSTER: "ha"}}}]
    assert rules["ha-etcd"][0] == {"from": ours, "ports": [{"port": "client"}]}
    assert all(rule["from"] for rule in (*rules["ha-etcd"], *rules["ha-master"], *rules["ha-store"]))
    assert {"ports": [{"port": "http"}]} in rules["ha-engine"]
    scrapers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert {"from": scrapers, "ports": [{"port": "admin"}]} in rules["ha-master"]


def test_the_masters_admin_port_is_open_to_nobody_unless_somebody_is_named() -> None:
    described = replace(cluster(), network_policies=NetworkPolicies())
    rules = built(described)["NetworkPolicy", "ha-master"]["spec"]["ingress"]
    assert all(rule["from"] for rule in rules)
    assert {"ports": [{"port": "http"}]} in built(described)["NetworkPolicy", "ha-store"]["spec"]["ingress"]


def test_an_etcd_with_nothing_to_do_gets_no_policy() -> None:
    alone = replace(cluster("engines-only"), network_policies=NetworkPolicies(), coordination=cluster().coordination)
    assert {name for kind, name in built(alone) if kind == "NetworkPolicy"} == {"engines-only-engine"}


def test_policies_can_be_turned_off() -> None:
    described = replace(cluster(), network_policies=NetworkPolicies(enabled=False))
    assert "NetworkPolicy" not in {kind for kind, _ in built(described)}


def test_prometheus_objects_only_where_their_kinds_exist_and_nobody_said_never() -> None:
    described = cluster()
    assert not BOTH & {kind for kind, _ in built(described, kinds=frozenset())}
    never = replace(described, observability=Observability(Monitoring.NEVER, Monitoring.NEVER))
    assert not BOTH & {kind for kind, _ in built(never)}
    made = built(described)
    assert made["ServiceMonitor", "ha"]["metadata"]["labels"]["release"] == "prometheus"


def test_every_pod_is_scraped_once() -> None:
    objects = built(cluster())
    (endpoint,) = objects["ServiceMonitor", "ha"]["spec"]["endpoints"]
    scraped = [
        name
        for (kind, name), item in objects.items()
        if kind == "Service" and endpoint["port"] in {port["name"] for port in item["spec"]["ports"]}
    ]
    assert scraped == ["ha-master", "ha-store-dram", "ha-store-wheel", "ha-engine"]
