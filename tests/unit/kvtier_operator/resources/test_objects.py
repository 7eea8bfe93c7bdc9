"""Which objects a cluster has, and how they belong together."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kvtier_operator import labels
from kvtier_operator.api import (
    KVCacheCluster,
    ManagedEtcd,
    parse,
)
from kvtier_operator.controller.dry_run import settled_layout
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.layout import Layout, Stage
from kvtier_operator.resources.objects.children import children
from kvtier_operator.testing.rendered import (
    Objects,
    built,
    container,
    environment,
    flags,
    pod,
    staged,
    workloads,
)

BOTH = frozenset({"ServiceMonitor", "PrometheusRule"})
CLUSTERS = Path(__file__).parents[3] / "golden" / "clusters"


def cluster(name: str = "highly-available") -> KVCacheCluster:
    return parse(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))


def engine_set(objects: Objects) -> Manifest:
    return next(item for (kind, name), item in objects.items() if kind == "StatefulSet" and "-engine-" in name)


def test_every_stage_is_there_and_things_come_in_their_order() -> None:
    made = staged(cluster())
    assert set(made) == set(Stage)
    kinds = {stage: {item["kind"] for item in items} for stage, items in made.items()}
    assert kinds[Stage.FOUNDATION] == {
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    }
    names = {stage: [item["metadata"]["name"] for item in items] for stage, items in made.items()}
    assert names[Stage.COORDINATION] == ["ha-etcd"]
    assert names[Stage.MASTERS] == ["ha-master"]
    assert names[Stage.STORE] == ["ha-store-dram", "ha-store-wheel"]
    assert kinds[Stage.MONITORING] == BOTH


def test_the_owner_is_named_only_when_the_api_server_knows_it() -> None:
    described = cluster()
    owners = {json.dumps(item["metadata"]["ownerReferences"]) for item in built(described).values()}
    (owner,) = json.loads(owners.pop())
    assert not owners
    assert (owner["kind"], owner["name"], owner["uid"]) == ("KVCacheCluster", "ha", described.metadata.uid)
    assert owner["controller"]
    assert owner["blockOwnerDeletion"]
    in_a_file = replace(described, metadata=replace(described.metadata, uid=""))
    assert all("ownerReferences" not in item["metadata"] for item in built(in_a_file).values())


def test_scaling_changes_no_template() -> None:
    described = cluster()
    full = settled_layout(described)
    fewer = replace(
        full,
        masters=1,
        pools={"dram": 1, "wheel": 1},
        engines=tuple(replace(engines, replicas=1) for engines in full.engines),
    )
    before, after = built(described, full), built(described, fewer)
    assert [item["spec"]["template"] for item in workloads(before)] == [
        item["spec"]["template"] for item in workloads(after)
    ]
    assert [item["spec"]["replicas"] for item in workloads(after)] == [3, 1, 1, 1, 1]


def test_a_workload_without_pods_is_still_described() -> None:
    none = Layout(engines=tuple(replace(one, replicas=0) for one in settled_layout(cluster()).engines))
    described = cluster()
    objects = {
        (item["kind"], item["metadata"]["name"]): item
        for items in children(described, none, {}, frozenset()).values()
        for item in items
    }
    assert {item["spec"]["replicas"] for item in workloads(objects)} == {0}
    assert "data" not in objects["ConfigMap", "ha-master"]


def test_clients_find_electing_masters_by_etcd_and_the_cluster_id() -> None:
    objects = built(cluster())
    master = flags(container(objects["StatefulSet", "ha-master"])["args"])
    store = objects["StatefulSet", "ha-store-dram"]
    members = ";".join(f"ha-etcd-{slot}.ha-etcd.llm.svc:21000" for slot in range(3))
    assert master["ha_backend_connstring"] == members
    assert (master["cluster_id"], master["enable_oplog"]) == ("llm.ha", "true")
    assert flags(container(store)["args"])["master_server_address"] == f"etcd://{members}"
    assert (
        environment(store)["MC_STORE_CLUSTER_ID"] == environment(engine_set(objects))["MC_STORE_CLUSTER_ID"] == "llm.ha"
    )


def test_one_master_is_dialled_by_name_and_needs_no_cluster_id() -> None:
    objects = built(cluster("minimal"))
    assert not any("etcd" in name for _, name in objects)
    store = objects["StatefulSet", "minimal-store-dram"]
    assert flags(container(store)["args"])["master_server_address"] == "minimal-master-0.minimal-master.llm.svc:20000"
    assert "MC_STORE_CLUSTER_ID" not in environment(store)
    assert "PodDisruptionBudget" not in {kind for kind, _ in objects}


def test_who_may_be_disrupted() -> None:
    objects = built(cluster())
    limits = {name: item["spec"] for (kind, name), item in objects.items() if kind == "PodDisruptionBudget"}
    assert set(limits) == {"ha-etcd", "ha-master", "ha-store-dram", "ha-engine"}
    assert limits["ha-etcd"]["minAvailable"] == 2
    assert limits["ha-master"]["minAvailable"] == 2
    assert limits["ha-store-dram"]["maxUnavailable"] == limits["ha-engine"]["maxUnavailable"] == 1


@pytest.mark.parametrize(("members", "quorum"), [(3, 2), (5, 3)])
def test_a_quorum_is_that_of_the_wanted_size_whatever_runs(members: int, quorum: int) -> None:
    described = cluster()
    managed = replace(described.coordination, managed=ManagedEtcd(members))
    objects = built(replace(described, coordination=managed), replace(settled_layout(described), etcd=1))
    assert objects["PodDisruptionBudget", "ha-etcd"]["spec"]["minAvailable"] == quorum
    initial = flags(pod(objects["StatefulSet", "ha-etcd"])["initContainers"][0]["command"])["initial-cluster"]
    assert len(initial.split(",")) == members


def test_the_api_leads_to_the_router_where_there_is_one() -> None:
    fused, split = built(cluster()), built(cluster("split"))
    api = fused["Service", "ha-api"]["spec"]
    assert api["selector"] == {labels.CLUSTER: "ha", labels.COMPONENT: "engine"}
    assert api["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert split["Service", "split-api"]["spec"]["selector"][labels.COMPONENT] == "router"


def test_the_leader_service_waits_for_a_leader() -> None:
    service = built(cluster())["Service", "ha-leader"]["spec"]
    assert service["selector"][labels.MASTER_ROLE] == labels.LEADER
    assert "publishNotReadyAddresses" not in service
