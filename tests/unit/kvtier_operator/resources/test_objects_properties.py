"""What holds for the objects of every cluster."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvtier_operator import labels
from kvtier_operator.api import (
    Coordination,
    Dialect,
    KVCacheCluster,
    ManagedEtcd,
    Master,
    Metadata,
    Model,
    PortRange,
    Protocol,
    Role,
    RoleType,
    Router,
    StoreKind,
    StorePool,
    Tiers,
    Transport,
)
from kvtier_operator.controller.dry_run import settled_layout
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.resources.engine import EnginePlace, StoreAddresses, engine_settings
from kvtier_operator.resources.objects.children import children
from kvtier_operator.resources.objects.places import ANY_ADDRESS, Places
from kvtier_operator.testing.rendered import blocks_of, staged
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.store_node.status import NodeStatus

DOCS = Path(__file__).parents[4] / "docs"
MASTER_METRICS = {"master_active_clients"}
"""Of the masters' metrics, those of which a running one was seen to have them."""


def tiers(*, store: bool) -> Tiers:
    return Tiers(1 << 26, 0.8, 2.0, store_enabled=store, prefetch_batch=2, prefetch_timeout_ms=0)


@st.composite
def fused_roles(draw: st.DrawFn) -> tuple[Role, ...]:
    names = draw(st.lists(st.sampled_from(["engine", "small", "large"]), min_size=1, max_size=3, unique=True))
    store = draw(st.booleans())
    return tuple(
        Role(
            name,
            RoleType.FUSED,
            draw(st.integers(0, 3)),
            draw(st.integers(1, 4)),
            8010 + 10 * n,
            tiers(store=store),
            {},
        )
        for n, name in enumerate(names)
    )


@st.composite
def split_roles(draw: st.DrawFn) -> tuple[Role, ...]:
    kinds = {"prefill": RoleType.PREFILL, "decode": RoleType.DECODE}
    return tuple(
        Role(name, kind, draw(st.integers(1, 2)), draw(st.integers(1, 3)), 8010 + 10 * n, tiers(store=True), {})
        for n, (name, kind) in enumerate(kinds.items())
    )


@st.composite
def clusters(draw: st.DrawFn, *, roles: st.SearchStrategy[tuple[Role, ...]] | None = None) -> KVCacheCluster:
    chosen = draw(roles if roles is not None else st.one_of(fused_roles(), split_roles()))
    split = chosen[0].type is not RoleType.FUSED
    store = chosen[0].tiers.store_enabled
    etcd = split or draw(st.booleans())
    pools = st.builds(
        StorePool,
        name=st.sampled_from(["dram", "big"]),
        kind=st.sampled_from(StoreKind),
        replicas=st.integers(0, 3),
        segment_bytes=st.just(1 << 30),
    )
    return KVCacheCluster(
        name="demo",
        master=Master(draw(st.integers(1, 3)) if etcd else 1, 10_000, 5_000),
        pools=tuple(draw(st.lists(pools, min_size=1, max_size=2, unique_by=lambda pool: pool.name))) if store else (),
        transport=Transport(
            Protocol.TCP, shared_memory=False, ports=PortRange(20000, 4000), host_network=draw(st.booleans())
        ),
        model=Model("pvc://models/tiny", "tiny"),
        roles=chosen,
        metadata=Metadata("llm", "u1"),
        dialect=Dialect.XLLM if split else Dialect.KVTIER,
        coordination=Coordination(managed=ManagedEtcd(draw(st.sampled_from([1, 3, 5])))) if etcd else Coordination(),
        router=Router(draw(st.integers(1, 2))) if split else None,
    )


def build(cluster: KVCacheCluster) -> list[Manifest]:
    made = staged(cluster)
    return [item for stage in Stage for item in made[stage]]


def workloads(objects: Sequence[Manifest]) -> list[Manifest]:
    return [item for item in objects if item["kind"] in {"StatefulSet", "Deployment"}]


def spec_of(workload: Manifest) -> Mapping[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


@given(clusters())
@settings(max_examples=12)
def test_names_are_unique_and_everything_is_labelled_and_stamped(cluster: KVCacheCluster) -> None:
    objects = build(cluster)
    names = Counter((item["kind"], item["metadata"]["name"]) for item in objects)
    assert names.most_common(1)[0][1] == 1
    for item in objects:
        meta = item["metadata"]
        assert meta["namespace"] == "llm"
        assert meta["labels"][labels.CLUSTER] == meta["labels"][labels.INSTANCE] == "demo"
        assert meta["labels"][labels.MANAGED_BY] == labels.MANAGER
        assert re.fullmatch("[0-9a-f]{16}", meta["annotations"][labels.APPLIED_HASH])
        assert meta["ownerReferences"][0]["uid"] == "u1"
    assert build(cluster) == objects


@given(clusters())
@settings(max_examples=12)
def test_selectors_select_their_own_pods_and_no_others(cluster: KVCacheCluster) -> None:
    sets = workloads(build(cluster))
    for one in sets:
        chosen = one["spec"]["selector"]["matchLabels"].items()
        matching = [item for item in sets if chosen <= item["spec"]["template"]["metadata"]["labels"].items()]
        assert matching == [one]
        assert one["spec"]["template"]["metadata"]["labels"][labels.COMPONENT] in set(Component)


@given(clusters())
@settings(max_examples=12)
def test_every_pod_is_as_restricted_as_kubernetes_asks(cluster: KVCacheCluster) -> None:
    for item in workloads(build(cluster)):
        spec = spec_of(item)
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] != 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert not spec["automountServiceAccountToken"]
        allowed = {"name", "emptyDir", "configMap", "persistentVolumeClaim"}
        assert all(set(volume) <= allowed for volume in spec["volumes"])
        assert spec.get("hostNetwork", False) == (cluster.transport.host_network and item["kind"] == "StatefulSet")
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        claimed = {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", ())}
        assert mounted == {volume["name"] for volume in spec["volumes"]} | claimed


@given(clusters())
@settings(max_examples=12)
def test_probes_and_services_name_ports_that_there_are(cluster: KVCacheCluster) -> None:
    objects = build(cluster)
    for item in workloads(objects):
        (container,) = spec_of(item)["containers"]
        names = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            how = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert how["port"] in names
    for service in (item for item in objects if item["kind"] == "Service"):
        chosen = {name: text for name, text in service["spec"]["selector"].items() if name != labels.MASTER_ROLE}
        for item in workloads(objects):
            if chosen.items() <= item["spec"]["template"]["metadata"]["labels"].items():
                (container,) = spec_of(item)["containers"]
                known = {port["name"]: port["containerPort"] for port in container["ports"]}
                assert all(port["targetPort"] in known for port in service["spec"]["ports"])


def slot_ports(objects: Sequence[Manifest]) -> Iterator[tuple[str, int, set[int]]]:
    """ConfigMap, slot and the ports that the slot's pod checks, for every slot."""
    for item in objects:
        for name, text in item.get("data", {}).items() if item["kind"] == "ConfigMap" else ():
            if match := re.fullmatch(r"slot-(\d+)\.ports", name):
                spans = [line.split("-") for line in text.split()]
                ports = {port for first, last in spans for port in range(int(first), int(last) + 1)}
                yield item["metadata"]["name"], int(match[1]), ports


@given(clusters())
@settings(max_examples=12)
def test_pods_that_may_share_a_node_share_no_port(cluster: KVCacheCluster) -> None:
    objects = build(cluster)
    claims = list(slot_ports(objects))
    for (config, _, mine), (other, _, theirs) in combinations(claims, 2):
        # Pods of one set share the port of their probes, and never a node where that would matter.
        assert config == other or not mine & theirs
    own = {port for role in cluster.roles for port in range(role.port, role.port + role.tensor)}
    own |= {cluster.router.port} if cluster.router else set()
    span = range(cluster.transport.ports.start, cluster.transport.ports.stop)
    for _, _, ports in claims:
        assert all(port in span or port in own for port in ports)
    for item in workloads(objects):
        (container,) = spec_of(item)["containers"]
        numbers = [port["containerPort"] for port in container["ports"]]
        assert len(set(numbers)) == len(numbers)
        assert all(number in span or number in own for number in numbers)


@given(clusters(roles=fused_roles()))
@settings(max_examples=12)
def test_template_and_slot_together_are_the_engines_settings(cluster: KVCacheCluster) -> None:
    objects = build(cluster)
    layout = settled_layout(cluster)
    places = Places(cluster, blocks_of(cluster))
    configs = {item["metadata"]["name"]: item.get("data", {}) for item in objects if item["kind"] == "ConfigMap"}
    for engines in layout.engines:
        name, role = (
            f"demo-{engines.role}-{engines.revision.name}",
            next(r for r in cluster.roles if r.name == engines.role),
        )
        workload = next(item for item in workloads(objects) if item["metadata"]["name"] == name)
        args = spec_of(workload)["containers"][0]["args"]
        for slot, block in places.slot_blocks(Component.ENGINE, engines.role, engines.revision.lane).items():
            parsed = WorkerSettings.from_argv([*args, *configs[name][f"slot-{slot}.flags"].split()])
            place = EnginePlace(
                model_dir="/models/models/tiny",
                ports=block,
                api_port=role.port,
                api_host=ANY_ADDRESS,
                store_host=f"{name}-{slot}.demo-{engines.role}.llm.svc",
            )
            assert parsed == engine_settings(cluster, role, place, StoreAddresses(places.master))
            assert parsed.violations() == ()


@given(clusters(), st.integers(0, 4))
@settings(max_examples=12)
def test_replicas_are_no_part_of_a_revision_and_of_no_template(cluster: KVCacheCluster, replicas: int) -> None:
    scaled = replace(cluster, roles=tuple(replace(role, replicas=replicas) for role in cluster.roles))
    assert revision_of(scaled) == revision_of(cluster)
    before, after = (
        {
            item["metadata"]["name"]: item["spec"]["template"]
            for item in workloads(build(one))
            if item["metadata"]["labels"][labels.COMPONENT] == Component.ENGINE
        }
        for one in (cluster, scaled)
    )
    assert before == after


def alerts(objects: Sequence[Manifest]) -> Iterator[Mapping[str, Any]]:
    for item in objects:
        if item["kind"] == "PrometheusRule":
            for group in item["spec"]["groups"]:
                yield from group["rules"]


@given(clusters())
@settings(max_examples=10)
def test_alerts_ask_for_metrics_that_exist_and_for_this_cluster_only(cluster: KVCacheCluster) -> None:
    engine = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    node = {family.name for family in NodeStatus(1, lambda: 0.0).registry.collect()}
    for alert in alerts(build(cluster)):
        asked = re.findall(r"([a-z_]+)\{(.*?)\}", alert["expr"])
        assert asked
        for name, matchers in asked:
            assert name in engine | node | MASTER_METRICS
            assert 'namespace="llm",kvtier_dev_cluster="demo"' in matchers


@given(clusters())
@settings(max_examples=12)
def test_no_engine_has_anything_of_the_range_but_its_block(cluster: KVCacheCluster) -> None:
    moved = replace(cluster, transport=replace(cluster.transport, ports=PortRange(40000, 9000)))
    made = [
        children(one, settled_layout(cluster), blocks_of(cluster), frozenset())[Stage.ENGINES]
        for one in (cluster, moved)
    ]
    assert made[0] == made[1]


@given(clusters())
@settings(max_examples=12)
def test_the_number_of_masters_changes_no_pods_but_theirs(cluster: KVCacheCluster) -> None:
    assume(cluster.coordination.uses_etcd)
    more = replace(cluster, master=replace(cluster.master, replicas=cluster.master.replicas + 2))
    before, after = (
        {item["metadata"]["name"]: item["spec"]["template"] for item in workloads(build(one))}
        for one in (cluster, more)
    )
    assert before == after
