"""What the API server refuses, and objects that the operator cannot understand: told, waited for, and let go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kvtier_operator.testing.api_client import ApiError
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import (
    OPERATOR,
    OPERATOR_NAMESPACE,
    small_cluster,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.waiting import wait_for

API = "/apis/kvtier.dev/v1alpha1/namespaces/{}/kvcacheclusters/{}"

pytestmark = pytest.mark.apiserver


@pytest.fixture(scope="module")
def operator(installed: ControlPlane) -> Iterator[OperatorProcess]:
    where = f"--operator_namespace={OPERATOR_NAMESPACE}"
    with OperatorProcess(installed.kubeconfig_of(OPERATOR), where, identity="one") as process:
        yield process


def apply(installed: ControlPlane, namespace: str, manifest: dict[str, Any]) -> None:
    installed.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(manifest))


def exists(installed: ControlPlane, path: str) -> bool:
    try:
        installed.api.get(path)
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


def says(installed: ControlPlane, namespace: str, name: str, kind: str, *words: str) -> bool:
    """A condition of the cluster is False and has these words."""
    conditions = installed.api.get(API.format(namespace, name)).get("status", {}).get("conditions", [])
    found: dict[str, str] = next(
        (item for item in conditions if item["type"] == kind and item["status"] == "False"), {}
    )
    return bool(found) and all(word in found["reason"] + found["message"] for word in words)


def test_what_cannot_be_understood_can_be_deleted(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    for name in ("invalid", "damaged"):
        apply(installed, namespace, small_cluster(name, deletion={"policy": "Drain"}))
        services = f"/api/v1/namespaces/{namespace}/services/{name}-api"
        wait_for("children", lambda path=services: exists(installed, path))  # type: ignore[misc]
    wrong = small_cluster("invalid", deletion={"policy": "Drain"})
    wrong["spec"]["roles"][0]["settings"] = {"no_such_setting": 1}
    apply(installed, namespace, wrong)
    wait_for("SpecValid=False", lambda: says(installed, namespace, "invalid", "SpecValid", "no_such_setting"))
    ledger = f"/api/v1/namespaces/{namespace}/configmaps/damaged-ports"
    installed.api.patch(ledger, {"data": dict.fromkeys(installed.api.get(ledger)["data"], "{broken")})
    wait_for("PortsAllocated=False", lambda: says(installed, namespace, "damaged", "PortsAllocated", "LedgerDamaged"))

    installed.kubectl("delete", "kvc", "invalid", "damaged", "-n", namespace, "--timeout=30s")


def test_a_full_quota_is_told_and_waited_for(
    installed: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    assert operator.running
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    hard = {"count/statefulsets.apps": "0"}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, "spec": {"hard": hard}}
    installed.api.create(quotas, body)
    wait_for("the quota", lambda: bool(installed.api.get(f"{quotas}/tight").get("status", {}).get("hard")))
    apply(installed, namespace, small_cluster("small"))
    wait_for("its words", lambda: says(installed, namespace, "small", "Ready", "ApplyRefused", "exceeded quota: tight"))
    events = json.loads(installed.kubectl("get", "events", "-n", namespace, "-o", "json"))["items"]
    assert [item for item in events if item["reason"] == "ApplyRefused"]
    installed.api.delete(f"{quotas}/tight")
    sets = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
    wait_for("the set", lambda: bool(installed.api.get(sets)["items"]))
    wait_for("other words", lambda: not says(installed, namespace, "small", "Ready", "ApplyRefused"))
