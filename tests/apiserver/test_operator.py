"""The operator as a process against a real API server, with exactly the rights of `deploy/rbac.yaml`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kvtier_operator.testing.answering_masters import answering_masters
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.installation import small_cluster, stored_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

pytestmark = pytest.mark.apiserver


def test_a_manifest_becomes_a_ready_cluster_and_applying_it_twice_changes_nothing(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    manifest = stored_cluster("qwen")
    tenant.apply(manifest)
    with answering_masters(tenant.control_plane, hollow_nodes, tenant.namespace, "qwen", {"dram": 2}) as masters:
        wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
        expected = {
            "StatefulSet/qwen-etcd",
            "StatefulSet/qwen-master",
            "StatefulSet/qwen-store-dram",
            "Service/qwen-api",
        }
        assert expected <= set(tenant.children())
        leads = ("-l", "kvtier.dev/master-role=leader", "-o", "name")
        assert tenant.kubectl("get", "pods", *leads).split() == ["pod/qwen-master-0"]

        table = tenant.kubectl("get", "kvc").splitlines()
        assert table[0].split()[:2] == ["NAME", "PHASE"]
        assert "qwen" in table[1]
        assert "Ready" in table[1]
        assert "LeaderElected" in tenant.kubectl("describe", "kvc", "qwen")

        tenant.settle()
        before = tenant.writes(), tenant.versions()
        tenant.apply(manifest)
        time.sleep(3)
        assert (tenant.writes(), tenant.versions()) == before

        masters.leader = hollow_nodes.address(tenant.namespace, "qwen-master-1")
        wait_for(
            "the new leader in the status",
            lambda: tenant.cluster("qwen")["status"].get("leader", {}).get("pod") == "qwen-master-1",
        )
        wait_for(
            "the label of the new leader",
            lambda: tenant.kubectl("get", "pods", *leads).split() == ["pod/qwen-master-1"],
        )
    assert operator.status("/healthz") == 200
    assert f"pass failed cluster={tenant.namespace}/" not in operator.log()
    assert operator.metric("kvtier_operator_cluster_condition", name="qwen", type="SpecValid") == 1


def test_a_pool_gets_smaller_only_when_the_node_s_objects_have_moved(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(stored_cluster("qwen"))

    def nodes() -> int:
        return int(tenant.children()["StatefulSet/qwen-store-dram"]["spec"]["replicas"])

    def is_told_on_the_pod() -> bool:
        pod = tenant.read("pods/qwen-store-dram-1")
        return pod is not None and "kvtier.dev/drain-job" in pod["metadata"].get("annotations", {})

    with answering_masters(tenant.control_plane, hollow_nodes, tenant.namespace, "qwen", {"dram": 2}) as masters:
        wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
        tenant.apply(stored_cluster("qwen", nodes=1))
        wait_for("a drain job", lambda: masters.jobs)
        wait_for("the job on the pod", is_told_on_the_pod)
        time.sleep(3)
        assert nodes() == 2
        masters.job_status = "SUCCEEDED"
        wait_for("one node", lambda: nodes() == 1)
        wait_for("that the pod is gone", lambda: tenant.read("pods/qwen-store-dram-1") is None)
        masters.segments = masters.segments[:1]
        wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    assert len(masters.jobs) == 1


def test_what_others_change_or_delete_is_set_right_and_what_they_add_stays(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    before = tenant.children()
    workload = next(name for name in before if name.startswith("StatefulSet/"))

    tenant.kubectl("scale", workload, "--replicas=5")
    odd = ("app.kubernetes.io/component-", "kvtier.dev/role=odd", "kvtier.dev/lane=B", "kvtier.dev/revision=odd")
    tenant.kubectl("label", workload, "--overwrite", *odd)
    tenant.kubectl("delete", "svc", "small-api")
    tenant.kubectl("label", "networkpolicy", "--all", "app.kubernetes.io/managed-by-")
    tenant.kubectl("annotate", workload, "example.org/theirs=yes")

    def is_right() -> bool:
        now = tenant.children()
        same = set(now) == set(before) and now[workload]["spec"]["replicas"] == 1
        return same and now[workload]["metadata"]["labels"] == before[workload]["metadata"]["labels"]

    wait_for("the old state", is_right)
    tenant.settle()
    now = tenant.children()
    assert now[workload]["metadata"]["annotations"]["example.org/theirs"] == "yes"
    assert {name: item["spec"] for name, item in now.items() if "spec" in item and "Service/" not in name} == {
        name: item["spec"] for name, item in before.items() if "spec" in item and "Service/" not in name
    }
    assert operator.metric("kvtier_operator_drift_repaired_total") >= 2


def test_a_change_of_one_spec_leaves_other_clusters_alone_and_takes_less_than_two_seconds(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(small_cluster("one"), small_cluster("two"))
    for name in ("one", "two"):
        tenant.wait_for_child(f"Service/{name}-api")
    tenant.settle()
    before = tenant.versions()
    changed = small_cluster("one")
    sets = f"/apis/apps/v1/namespaces/{tenant.namespace}/statefulsets?labelSelector=kvtier.dev/cluster=one"

    def seconds_until(replicas: int) -> float:
        changed["spec"]["roles"][0]["replicas"] = replicas
        begun = time.monotonic()
        tenant.apply(changed)
        wait_for("the change", lambda: tenant.control_plane.api.get(sets)["items"][0]["spec"]["replicas"] == replicas)
        return time.monotonic() - begun

    # Of several times: what else runs on the machine may be in the way of one.
    assert any(seconds_until(replicas) < 2 for replicas in (3, 4, 5, 2))
    tenant.settle()
    touched = tenant.changed_since(before)
    assert touched
    assert not [name for name in touched if "/two" in name]


def test_an_object_of_somebody_else_is_never_taken_over(tenant: Tenant, operator: OperatorProcess) -> None:
    assert operator.running
    meta = {"name": "small-api"}
    tenant.apply({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"ports": [{"port": 1234}]}})
    before = tenant.read("services/small-api")
    assert before is not None
    tenant.apply(small_cluster("small"))

    def is_named() -> bool:
        conditions = tenant.cluster("small").get("status", {}).get("conditions", [])
        return any("Service/small-api" in item["message"] for item in conditions)

    wait_for("a condition that names the object", is_named)
    tenant.settle()
    assert tenant.read("services/small-api") == before
    tenant.kubectl("delete", "svc", "small-api")
    tenant.wait_for_child("Service/small-api")


def test_a_spec_that_only_the_parser_can_refuse_is_named_in_the_status_and_children_stay(
    tenant: Tenant, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(small_cluster("small"))
    tenant.wait_for_child("Service/small-api")
    tenant.settle()
    before = tenant.versions()
    wrong = small_cluster("small")
    wrong["spec"]["roles"][0]["settings"] = {"no_such_setting": 1, "another_one": 2}
    tenant.apply(wrong)
    wait_for("SpecValid=False", lambda: tenant.is_false("small", "SpecValid", "no_such_setting", "another_one"))
    assert tenant.cluster("small")["status"]["phase"] == "Failed"
    assert tenant.versions() == before
    tenant.apply(small_cluster("small"))
    wait_for("SpecValid=True", lambda: tenant.is_true("small", "SpecValid"))


def test_a_dry_run_prints_what_the_api_server_takes(tenant: Tenant, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    manifest = stored_cluster("qwen")
    manifest["metadata"]["namespace"] = tenant.namespace
    file.write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "kvtier_operator.controller.main", "--dry-run", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""}).stdout
    documents = list(yaml.safe_load_all(printed))
    assert {"StatefulSet", "Service", "ServiceMonitor"} <= {document["kind"] for document in documents}
    standard = [document for document in documents if "monitoring" not in document["apiVersion"]]
    tenant.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(standard))
