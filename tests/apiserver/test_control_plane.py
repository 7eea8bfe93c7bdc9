"""The control plane and its hollow nodes do what the other tests of this folder rely on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtier_operator.errors import ProcessFailed
from kvtier_operator.testing.api_client import STRATEGIC_PATCH, RequestFailed
from kvtier_operator.testing.control_plane import APISERVER, ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.kubectl import KubectlFailed
from kvtier_operator.testing.waiting import wait_for

BOOT_LIMIT_S = 30
"""Some seconds alone on two cores; this leaves room for what else runs there."""

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"key": "value"}}


def stateful_set(replicas: int, name: str = "web", **pod: Any) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "main", "image": "example.test/main:1"}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], **pod}},
        },
    }


class Workload:
    """A StatefulSet and its pods."""

    def __init__(self, control_plane: ControlPlane, namespace: str, name: str = "web") -> None:
        self.api = control_plane.api
        self.namespace = namespace
        self.path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"
        self.name = name

    def create(self, manifest: dict[str, Any]) -> None:
        self.api.create(self.path.rpartition("/")[0], manifest)

    def num_ready(self) -> int:
        return int(self.api.get(self.path)["status"].get("readyReplicas", 0))

    def pod(self, ordinal: int) -> dict[str, Any]:
        """The pod; without anything in it while there is none."""
        try:
            return self.api.get(f"/api/v1/namespaces/{self.namespace}/pods/{self.name}-{ordinal}")
        except RequestFailed:
            return {"metadata": {}, "spec": {}, "status": {}}

    def wait_ready(self, count: int) -> None:
        wait_for(f"{count} ready pods", lambda: self.num_ready() == count)


@pytest.fixture
def workload(control_plane: ControlPlane, namespace: str) -> Workload:
    return Workload(control_plane, namespace)


@pytest.fixture
def restored(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Starts the API server again if a test fails while it is down."""
    try:
        yield control_plane
    finally:
        try:
            control_plane.check()
        except ProcessFailed:
            control_plane.start_apiserver()


def test_a_second_control_plane_boots_in_time_beside_the_first(control_plane: ControlPlane) -> None:
    started = time.monotonic()
    with ControlPlane() as second:
        assert time.monotonic() - started < BOOT_LIMIT_S
        assert second.server != control_plane.server
        assert second.kubectl("get", "--raw", "/readyz") == "ok"
        folder = second.kubeconfig.parent
    assert not folder.exists()
    assert control_plane.kubectl("get", "--raw", "/readyz") == "ok"


def test_the_server_has_the_version_that_we_state(control_plane: ControlPlane) -> None:
    version = json.loads(control_plane.kubectl("version", "--output=json"))
    minor = int(version["serverVersion"]["minor"].rstrip("+"))
    assert minor >= 34
    assert version["serverVersion"]["gitVersion"].startswith(f"v1.{minor}.")


def test_namespaces_keep_objects_apart(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(CONFIG_MAP))
    with control_plane.namespace() as other:
        assert other != namespace
        control_plane.kubectl("apply", "-n", other, "-f", "-", stdin=json.dumps(CONFIG_MAP))
        path = f"/api/v1/namespaces/{other}"
    wait_for("the left namespace is gone or going", lambda: _phase(control_plane, path) in ("", "Terminating"))
    assert control_plane.kubectl("get", "configmap", "one", "-n", namespace, "--output=name").strip() == "configmap/one"


def _phase(control_plane: ControlPlane, path: str) -> str:
    try:
        return str(control_plane.api.get(path)["status"]["phase"])
    except RequestFailed:
        return ""


def test_a_user_without_rights_is_refused_until_a_role_grants_some(control_plane: ControlPlane, namespace: str) -> None:
    question = ("get", "configmaps", "-n", namespace)
    with pytest.raises(KubectlFailed, match='User "stranger" cannot list resource "configmaps"'):
        control_plane.kubectl(*question, user="stranger")
    grant = ("create", "rolebinding", "reader", "--clusterrole=view", "--user=stranger", "-n", namespace)
    control_plane.kubectl(*grant)
    wait_for("the grant counts", lambda: "kube-root-ca.crt" in control_plane.kubectl(*question, user="stranger"))
    with pytest.raises(RequestFailed) as refused:
        control_plane.api_of("stranger").create(f"/api/v1/namespaces/{namespace}/configmaps", CONFIG_MAP)
    assert refused.value.status == 403


def test_a_restart_of_the_api_server_keeps_objects_and_address(restored: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    restored.api.create(path, CONFIG_MAP)
    restored.stop_apiserver()
    with pytest.raises(OSError, match="refused"):
        restored.api.get(f"{path}/one")
    restored.start_apiserver()
    assert restored.api.get(f"{path}/one")["data"] == {"key": "value"}


def test_a_process_that_ended_is_named_with_its_last_words(restored: ControlPlane) -> None:
    restored.stop_apiserver()
    with pytest.raises(ProcessFailed, match="kube-apiserver ended by itself") as failure:
        restored.check()
    assert failure.value.log_tail
    assert failure.value.__notes__[0].startswith("kube-apiserver wrote last:")
    assert restored.logs(APISERVER, 1).strip() == failure.value.log_tail[-1].strip()


def test_a_process_that_cannot_start_is_named_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "etcd"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 3.6.0 && exit\necho the disk is on fire\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    broken_one = ControlPlane(state_dir=tmp_path / "state")
    with pytest.raises(ProcessFailed, match="etcd ended by itself") as failure:
        broken_one.start()
    assert failure.value.log_tail == ("the disk is on fire",)
    with pytest.raises(OSError, match="refused"):
        broken_one.api.get("/readyz")
    broken_one.stop()


def test_writes_of_a_user_are_known(control_plane: ControlPlane, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    before = len(control_plane.writes("admin"))
    control_plane.api.get(path)
    assert len(control_plane.writes("admin")) == before
    control_plane.api.create(f"{path}?fieldManager=me", CONFIG_MAP)
    with pytest.raises(RequestFailed):
        control_plane.api.create(path, CONFIG_MAP)
    first, second = control_plane.writes("admin")[before:]
    assert (first.verb, first.resource, first.namespace, first.manager) == ("create", "configmaps", namespace, "me")
    assert (first.code, second.code) == (201, 409)


def test_hollow_nodes_run_a_stateful_set(hollow_nodes: HollowNodes, workload: Workload) -> None:
    workload.create(stateful_set(3))
    workload.wait_ready(3)
    pods = [workload.pod(ordinal) for ordinal in range(3)]
    assert {pod["spec"]["nodeName"] for pod in pods} <= set(hollow_nodes.names)
    addresses = {pod["status"]["podIP"] for pod in pods}
    assert len(addresses) == 3
    assert all(address.startswith("127.") for address in addresses)
    assert hollow_nodes.address(workload.namespace, "web-1") == pods[1]["status"]["podIP"]


def test_a_deleted_pod_goes_and_comes_back_under_its_name(hollow_nodes: HollowNodes, workload: Workload) -> None:
    workload.create(stateful_set(2))
    workload.wait_ready(2)
    old = workload.pod(0)
    workload.api.delete(f"/api/v1/namespaces/{workload.namespace}/pods/web-0")
    wait_for("a new pod", lambda: workload.pod(0)["metadata"].get("uid") not in (None, old["metadata"]["uid"]))
    workload.wait_ready(2)
    assert workload.pod(0)["status"]["podIP"] != old["status"]["podIP"]


def test_failing_and_held_pods_are_reported_until_released(hollow_nodes: HollowNodes, workload: Workload) -> None:
    hollow_nodes.fail("web-0")
    hollow_nodes.hold(f"{workload.namespace}/web-1")
    workload.create(stateful_set(3))
    workload.wait_ready(1)
    wait_for("a crash loop", lambda: _waiting_reason(workload.pod(0)) == "CrashLoopBackOff")
    wait_for("a running pod that is not ready", lambda: _is_running(workload.pod(1)))
    assert workload.num_ready() == 1
    hollow_nodes.release("web-0")
    workload.wait_ready(2)
    hollow_nodes.release()
    workload.wait_ready(3)


def _waiting_reason(pod: dict[str, Any]) -> str:
    statuses = pod["status"].get("containerStatuses", [{}])
    return str(statuses[0].get("state", {}).get("waiting", {}).get("reason", ""))


def _is_running(pod: dict[str, Any]) -> bool:
    statuses = pod["status"].get("containerStatuses", [{}])
    return "running" in statuses[0].get("state", {}) and pod["status"]["phase"] == "Running"


def test_a_readiness_gate_keeps_a_pod_from_being_ready(hollow_nodes: HollowNodes, workload: Workload) -> None:
    workload.create(stateful_set(1, readinessGates=[{"conditionType": "example.test/served"}]))
    wait_for("running containers", lambda: _conditions(workload.pod(0)).get("ContainersReady") == "True")
    assert _conditions(workload.pod(0))["Ready"] == "False"
    condition = {"type": "example.test/served", "status": "True"}
    path = f"/api/v1/namespaces/{workload.namespace}/pods/web-0/status"
    workload.api.patch(path, {"status": {"conditions": [condition]}}, STRATEGIC_PATCH)
    workload.wait_ready(1)


def _conditions(pod: dict[str, Any]) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in pod.get("status", {}).get("conditions", [])}


def test_hollow_nodes_survive_a_restart_of_the_api_server(
    restored: ControlPlane, hollow_nodes: HollowNodes, workload: Workload
) -> None:
    workload.create(stateful_set(1))
    workload.wait_ready(1)
    restored.stop_apiserver()
    restored.start_apiserver()
    workload.api.patch(workload.path, {"spec": {"replicas": 3}})
    workload.wait_ready(3)


def test_hundreds_of_pods_run_and_leave(hollow_nodes: HollowNodes, workload: Workload) -> None:
    workload.create(stateful_set(200))
    wait_for("200 ready pods", lambda: workload.num_ready() == 200)
    workload.api.patch(workload.path, {"spec": {"replicas": 0}})
    pods = f"/api/v1/namespaces/{workload.namespace}/pods?limit=1"
    wait_for("no pods", lambda: not workload.api.get(pods)["items"])


def test_a_namespace_with_pods_goes_when_the_hollow_nodes_have_left(control_plane: ControlPlane) -> None:
    with control_plane.namespace() as name:
        workload = Workload(control_plane, name)
        with HollowNodes(control_plane.api, 1) as nodes:
            workload.create(stateful_set(2))
            workload.wait_ready(2)
        assert control_plane.kubectl("get", "nodes", *nodes.names, "--ignore-not-found") == ""
    wait_for("the namespace is gone", lambda: _phase(control_plane, f"/api/v1/namespaces/{name}") == "")


def test_a_pod_takes_as_long_to_end_as_its_node_is_told(control_plane: ControlPlane, namespace: str) -> None:
    workload = Workload(control_plane, namespace)
    path = f"/api/v1/namespaces/{namespace}/pods/web-0"
    with HollowNodes(control_plane.api, 1, termination_s=1.0) as nodes:
        workload.create(stateful_set(1))
        workload.wait_ready(1)
        started = time.monotonic()
        uid = control_plane.api.delete(path)["metadata"]["uid"]
        assert workload.pod(0)["metadata"]["uid"] == uid
        wait_for("a new pod", lambda: workload.pod(0)["metadata"].get("uid") not in (None, uid))
        assert time.monotonic() - started > 0.9
        assert nodes.names == ("hollow-0",)
