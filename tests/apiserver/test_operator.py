"""The operator as a process against a real API server, with exactly the rights of `deploy/rbac.yaml`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator.testing.answering_masters import answering_masters
from kvtier_operator.testing.api_client import ApiError
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.installation import (
    CRD_NAME,
    OPERATOR,
    OPERATOR_NAMESPACE,
    install_definition,
    small_cluster,
    stored_cluster,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.waiting import PATIENCE_S, wait_for

STRANGER = "stranger"
"""A user of the control plane without any rights of its own."""
KINDS = "sts,deploy,svc,cm,sa,pdb,netpol"
OURS = "app.kubernetes.io/managed-by=kvtier-operator"
API = "/apis/kvtier.dev/v1alpha1/namespaces/{}/kvcacheclusters/{}"

pytestmark = pytest.mark.apiserver


@pytest.fixture
def start(installed: ControlPlane) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts operators that end with the test."""
    with ExitStack() as stack:

        def begin(*flags: str, identity: str = "") -> OperatorProcess:
            where = f"--operator_namespace={OPERATOR_NAMESPACE}"
            process = OperatorProcess(installed.kubeconfig_of(OPERATOR), where, *flags, identity=identity)
            return stack.enter_context(process)

        yield begin


@pytest.fixture
def operator(start: Callable[..., OperatorProcess]) -> OperatorProcess:
    return start(identity="one")


def apply(installed: ControlPlane, namespace: str, manifest: dict[str, Any]) -> None:
    installed.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))


def read(installed: ControlPlane, path: str) -> dict[str, Any] | None:
    try:
        return installed.api.get(path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def cluster(installed: ControlPlane, namespace: str, name: str) -> dict[str, Any]:
    return read(installed, API.format(namespace, name)) or {}


def condition(body: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = body.get("status", {}).get("conditions", [])
    found: dict[str, Any] = next((item for item in conditions if item["type"] == kind), {})
    return found


def is_true(installed: ControlPlane, namespace: str, name: str, kind: str) -> bool:
    body = cluster(installed, namespace, name)
    found = condition(body, kind)
    current = found.get("observedGeneration") == body.get("metadata", {}).get("generation")
    return bool(current and found["status"] == "True")


def children(installed: ControlPlane, namespace: str) -> dict[str, dict[str, Any]]:
    """Our objects by KIND/NAME."""
    listed = json.loads(installed.kubectl("get", KINDS, "-n", namespace, "-l", OURS, "-o", "json"))
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in listed["items"]}


def has_child(installed: ControlPlane, namespace: str, name: str) -> bool:
    return name in children(installed, namespace)


def versions(installed: ControlPlane, namespace: str) -> dict[str, str]:
    found = children(installed, namespace)
    return {name: item["metadata"]["resourceVersion"] for name, item in found.items()}


def writes(installed: ControlPlane, namespace: str) -> list[str]:
    """What the operator wrote there so far."""
    return [
        f"{write.verb} {write.resource}/{write.name} {write.code}"
        for write in installed.writes(OPERATOR)
        if write.namespace == namespace
    ]


def settle(installed: ControlPlane, namespace: str, quiet_s: float = 1.5) -> None:
    """Wait until the operator writes no more, and the controllers of Kubernetes change no child."""
    seen, since = (writes(installed, namespace), versions(installed, namespace)), time.monotonic()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() - since < quiet_s:
        time.sleep(0.3)
        if (now := (writes(installed, namespace), versions(installed, namespace))) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() < deadline, f"the operator does not stop writing: {seen[0][-10:]}"


def test_a_manifest_becomes_a_ready_cluster_and_applying_it_twice_changes_nothing(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    manifest = stored_cluster("qwen")
    apply(installed, namespace, manifest)
    with answering_masters(installed, hollow_nodes, namespace, "qwen", {"dram": 2}) as masters:
        wait_for("Ready", lambda: is_true(installed, namespace, "qwen", "Ready"))
        expected = {
            "StatefulSet/qwen-etcd",
            "StatefulSet/qwen-master",
            "StatefulSet/qwen-store-dram",
            "Service/qwen-api",
        }
        assert expected <= set(children(installed, namespace))
        pod = installed.api.get(f"/api/v1/namespaces/{namespace}/pods/qwen-master-0")
        assert pod["metadata"]["labels"]["kvtier.dev/master-role"] == "leader"

        table = installed.kubectl("get", "kvc", "-n", namespace).splitlines()
        assert table[0].split()[:2] == ["NAME", "PHASE"]
        assert "qwen" in table[1]
        assert "Ready" in table[1]
        described = installed.kubectl("describe", "kvc", "qwen", "-n", namespace)
        assert "LeaderElected" in described

        settle(installed, namespace)
        before = writes(installed, namespace), versions(installed, namespace)
        apply(installed, namespace, manifest)
        time.sleep(3)
        assert (writes(installed, namespace), versions(installed, namespace)) == before

        second = hollow_nodes.address(namespace, "qwen-master-1")
        masters.leader = second
        wait_for(
            "the new leader in the status",
            lambda: cluster(installed, namespace, "qwen")["status"].get("leader", {}).get("pod") == "qwen-master-1",
        )
        wait_for(
            "the label of the new leader",
            lambda: (
                [
                    item["metadata"]["name"]
                    for item in installed.api.get(
                        f"/api/v1/namespaces/{namespace}/pods?labelSelector=kvtier.dev/master-role=leader"
                    )["items"]
                ]
                == ["qwen-master-1"]
            ),
        )
    assert operator.status("/healthz") == 200
    assert f"pass failed cluster={namespace}/" not in operator.log()
    assert operator.metric("kvtier_operator_cluster_condition", name="qwen", type="SpecValid") == 1


def test_a_pool_gets_smaller_only_when_the_node_s_objects_have_moved(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    apply(installed, namespace, stored_cluster("qwen"))
    sets = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/qwen-store-dram"
    with answering_masters(installed, hollow_nodes, namespace, "qwen", {"dram": 2}) as masters:
        wait_for("Ready", lambda: is_true(installed, namespace, "qwen", "Ready"))
        apply(installed, namespace, stored_cluster("qwen", nodes=1))
        wait_for("a drain job", lambda: masters.jobs)
        pod = f"/api/v1/namespaces/{namespace}/pods/qwen-store-dram-1"
        wait_for(
            "the job on the pod",
            lambda: "kvtier.dev/drain-job" in installed.api.get(pod)["metadata"].get("annotations", {}),
        )
        time.sleep(3)
        assert installed.api.get(sets)["spec"]["replicas"] == 2
        masters.job_status = "SUCCEEDED"
        wait_for("one node", lambda: installed.api.get(sets)["spec"]["replicas"] == 1)
        wait_for("that the pod is gone", lambda: read(installed, pod) is None)
        masters.segments = masters.segments[:1]
        wait_for("Ready", lambda: is_true(installed, namespace, "qwen", "Ready"))
    assert len(masters.jobs) == 1


def test_what_others_change_or_delete_is_set_right_and_what_they_add_stays(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    before = children(installed, namespace)
    workload = next(name for name in before if name.startswith("StatefulSet/"))

    installed.kubectl("scale", workload, "--replicas=5", "-n", namespace)
    odd = ("app.kubernetes.io/component-", "kvtier.dev/role=odd", "kvtier.dev/lane=B", "kvtier.dev/revision=odd")
    installed.kubectl("label", workload, "-n", namespace, "--overwrite", *odd)
    installed.kubectl("delete", "svc", "small-api", "-n", namespace)
    installed.kubectl("label", "networkpolicy", "--all", "-n", namespace, "app.kubernetes.io/managed-by-")
    installed.kubectl("annotate", workload, "-n", namespace, "example.org/theirs=yes")

    def is_right() -> bool:
        now = children(installed, namespace)
        same = set(now) == set(before) and now[workload]["spec"]["replicas"] == 1
        return same and now[workload]["metadata"]["labels"] == before[workload]["metadata"]["labels"]

    wait_for("the old state", is_right)
    settle(installed, namespace)
    now = children(installed, namespace)
    assert now[workload]["metadata"]["annotations"]["example.org/theirs"] == "yes"
    assert {name: item["spec"] for name, item in now.items() if "spec" in item and "Service/" not in name} == {
        name: item["spec"] for name, item in before.items() if "spec" in item and "Service/" not in name
    }
    assert operator.metric("kvtier_operator_drift_repaired_total") >= 2


def test_a_change_of_one_spec_leaves_other_clusters_alone_and_takes_less_than_two_seconds(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    for name in ("one", "two"):
        apply(installed, namespace, small_cluster(name))
    for name in ("one", "two"):
        wait_for("children", partial(has_child, installed, namespace, f"Service/{name}-api"))
    settle(installed, namespace)
    before = versions(installed, namespace)
    changed = small_cluster("one")
    path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets?labelSelector=kvtier.dev/cluster=one"

    def seconds_until(replicas: int) -> float:
        changed["spec"]["roles"][0]["replicas"] = replicas
        begun = time.monotonic()
        apply(installed, namespace, changed)
        wait_for("the change", lambda: installed.api.get(path)["items"][0]["spec"]["replicas"] == replicas)
        return time.monotonic() - begun

    # Of several times: what else runs on the machine may be in the way of one.
    assert any(seconds_until(replicas) < 2 for replicas in (3, 4, 5, 2))
    settle(installed, namespace)
    after = versions(installed, namespace)
    touched = {name for name in after if after[name] != before.get(name)}
    assert touched
    assert not [name for name in touched if "/two" in name]


def test_an_object_of_somebody_else_is_never_taken_over(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "small-api"},
        "spec": {"ports": [{"port": 1234}]},
    }
    apply(installed, namespace, theirs)
    path = f"/api/v1/namespaces/{namespace}/services/small-api"
    before = installed.api.get(path)
    apply(installed, namespace, small_cluster("small"))

    def named() -> bool:
        conditions = cluster(installed, namespace, "small").get("status", {}).get("conditions", [])
        return any("Service/small-api" in item["message"] for item in conditions)

    wait_for("a condition that names the object", named)
    settle(installed, namespace)
    assert installed.api.get(path) == before
    installed.kubectl("delete", "svc", "small-api", "-n", namespace)
    wait_for("our own Service", lambda: "Service/small-api" in children(installed, namespace), 60)


def test_a_spec_that_only_the_parser_can_refuse_is_named_in_the_status_and_children_stay(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    before = versions(installed, namespace)
    wrong = small_cluster("small")
    wrong["spec"]["roles"][0]["settings"] = {"no_such_setting": 1, "another_one": 2}
    apply(installed, namespace, wrong)

    def refused() -> bool:
        found = condition(cluster(installed, namespace, "small"), "SpecValid")
        return found.get("status") == "False" and "no_such_setting" in found["message"]

    wait_for("SpecValid=False", refused)
    body = cluster(installed, namespace, "small")
    assert "another_one" in condition(body, "SpecValid")["message"]
    assert body["status"]["phase"] == "Failed"
    assert versions(installed, namespace) == before
    apply(installed, namespace, small_cluster("small"))
    wait_for("SpecValid=True", lambda: is_true(installed, namespace, "small", "SpecValid"))


def test_of_two_operators_one_acts_and_the_other_takes_over(
    installed: ControlPlane, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    one = start(identity="one")
    wait_for("a leader", lambda: one.leads)
    two = start(identity="two")
    time.sleep(2.5)
    assert not two.leads
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    assert two.metric("kvtier_operator_applies_total") == 0
    assert two.metric("kvtier_operator_clusters") >= 1
    before = writes(installed, namespace)

    assert one.stop() == 0
    wait_for("that the second leads soon after a clean end", lambda: two.leads, 6)
    one.start()
    assert not one.leads
    two.kill()
    wait_for("that the first leads again after a crash", lambda: one.leads, 25)
    time.sleep(1)
    assert writes(installed, namespace) == before
    installed.kubectl("delete", "svc", "small-api", "-n", namespace)
    wait_for("that it acts", lambda: "Service/small-api" in children(installed, namespace))


def test_a_restart_of_the_api_server_changes_nothing_and_hides_nothing(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    """The new process of the server has forgotten what watches missed; lists show it."""
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    before = versions(installed, namespace)
    installed.stop_apiserver()
    time.sleep(4)
    installed.start_apiserver()
    installed.api.delete(f"/api/v1/namespaces/{namespace}/services/small-api")
    wait_for("the Service", lambda: "Service/small-api" in children(installed, namespace), 20)
    wait_for("that it leads", lambda: operator.leads)
    settle(installed, namespace)
    after = versions(installed, namespace)
    assert {name for name in after if after[name] != before.get(name)} == {"Service/small-api"}
    assert operator.status("/healthz") == 200


def test_an_operator_that_slept_through_a_deletion_sees_it_when_it_wakes(
    installed: ControlPlane, namespace: str, start: Callable[..., OperatorProcess]
) -> None:
    operator = start(identity="one")
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    operator.kill()
    installed.kubectl("delete", "svc", "small-api", "-n", namespace)
    before = versions(installed, namespace)
    operator.start()
    wait_for("the Service", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    after = versions(installed, namespace)
    assert {name for name in after if after[name] != before.get(name)} == {"Service/small-api"}


def test_a_namespace_that_is_deleted_takes_its_cluster_along_and_nobody_else_notices(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    apply(installed, namespace, small_cluster("stays"))
    wait_for("children", lambda: "Service/stays-api" in children(installed, namespace))
    with installed.namespace("doomed") as doomed:
        apply(installed, doomed, small_cluster("goes"))
        wait_for("children", lambda: "Service/goes-api" in children(installed, doomed))
        settle(installed, namespace)
        before = writes(installed, namespace)
        installed.kubectl("delete", "namespace", doomed, "--wait=false")
        wait_for("the end of the namespace", lambda: read(installed, f"/api/v1/namespaces/{doomed}") is None, 60)
    wait_for(
        "that the operator forgets it",
        lambda: not operator.metric("kvtier_operator_cluster_condition", name="goes", type="SpecValid"),
    )
    assert writes(installed, namespace) == before
    assert operator.running


def test_an_operator_of_one_namespace_needs_rights_only_there(installed: ControlPlane, namespace: str) -> None:
    for where, role in ((namespace, "clusterrole"), (OPERATOR_NAMESPACE, "clusterrole"), (OPERATOR_NAMESPACE, "role")):
        binding = f"{STRANGER}-{role}"
        installed.kubectl("delete", "rolebinding", binding, "-n", where, "--ignore-not-found")
        installed.kubectl("create", "rolebinding", binding, "-n", where, f"--{role}={OPERATOR}", f"--user={STRANGER}")
    flags = (f"--namespace={namespace}", f"--operator_namespace={OPERATOR_NAMESPACE}")
    with (
        installed.namespace("other") as other,
        OperatorProcess(installed.kubeconfig_of(STRANGER), *flags, identity="one") as operator,
    ):
        apply(installed, other, small_cluster("theirs"))
        apply(installed, namespace, small_cluster("ours"))
        wait_for("children", lambda: "Service/ours-api" in children(installed, namespace))
        wait_for("a status", lambda: condition(cluster(installed, namespace, "ours"), "Ready"))
        assert children(installed, other) == {}
        assert operator.metric("kvtier_operator_clusters") == 1
        assert operator.metric("kvtier_operator_api_requests_total", code="403") == 0


def test_without_the_definition_the_operator_says_so_and_waits_for_it(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    operator.stop()
    installed.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")
    try:
        operator.start(wait=False)
        wait_for("its words", lambda: "kubectl apply -f crds/" in operator.log())
        assert operator.status("/readyz") == 503
        assert operator.running
    finally:
        install_definition(installed)
    wait_for("that it is ready", lambda: operator.status("/readyz") == 200)
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))


def test_a_definition_that_goes_and_comes_back_under_a_running_operator_is_served_again(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    apply(installed, namespace, small_cluster("goes"))
    wait_for("children", lambda: "Service/goes-api" in children(installed, namespace))
    installed.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")
    try:
        wait_for("that it is not ready", lambda: operator.status("/readyz") == 503)
    finally:
        install_definition(installed)
    wait_for("that it is ready", lambda: operator.status("/readyz") == 200)
    apply(installed, namespace, small_cluster("comes"))
    wait_for("children", lambda: "Service/comes-api" in children(installed, namespace))
    assert operator.running


def test_an_upgrade_of_the_definition_writes_nothing_and_stops_nothing(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    apply(installed, namespace, small_cluster("small"))
    wait_for("children", lambda: "Service/small-api" in children(installed, namespace))
    settle(installed, namespace)
    before = writes(installed, namespace)
    column = {"name": "UID", "type": "string", "jsonPath": ".metadata.uid", "priority": 1}
    patch = [{"op": "add", "path": "/spec/versions/0/additionalPrinterColumns/-", "value": column}]
    installed.kubectl("patch", "crd", CRD_NAME, "--type=json", "-p", json.dumps(patch))
    time.sleep(1)
    apply(installed, namespace, small_cluster("later"))
    wait_for("children", lambda: "Service/later-api" in children(installed, namespace))
    settle(installed, namespace)
    assert not [write for write in writes(installed, namespace)[len(before) :] if "small" in write]
    install_definition(installed)


def test_a_dry_run_prints_what_the_api_server_takes(installed: ControlPlane, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    manifest = stored_cluster("qwen")
    manifest["metadata"]["namespace"] = namespace
    file.write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "kvtier_operator.controller.main", "--dry-run", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""}).stdout
    kinds = {document["kind"] for document in yaml.safe_load_all(printed)}
    assert {"StatefulSet", "Service", "ServiceMonitor"} <= kinds
    standard = [document for document in yaml.safe_load_all(printed) if "monitoring" not in document["apiVersion"]]
    installed.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(standard))
