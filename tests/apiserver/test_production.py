"""`examples/production.yaml` as it stands, from `kubectl apply` to Ready, through a rest, to the end of its deletion.

The test adds what a cluster for production has and a bare control plane has not: volumes, devices, labelled nodes and
the definitions of the Prometheus operator.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml
from kvtier_operator.testing.answering_masters import answering_masters
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.hollow_registry import NodeShape
from kvtier_operator.testing.installation import (
    OPERATOR,
    OPERATOR_NAMESPACE,
    ROOT,
    install_definition,
    install_rights,
)
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import KINDS, OURS, Tenant
from kvtier_operator.testing.waiting import wait_for

EXAMPLE = ROOT / "examples" / "production.yaml"
BAD = frozenset({"Degraded", "RolloutHalted", "DrainBlocked", "TransportPlaintext", "Progressing"})
"""Conditions that are False in a cluster at rest."""

MONITORING = {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"}
NODE = NodeShape(
    {"cpu": "64", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "500", "nvidia.com/gpu": "8"},
    {"node.kubernetes.io/memory": "large"},
)

pytestmark = pytest.mark.apiserver


def definition(plural: str, kind: str) -> dict[str, Any]:
    """Takes every object of the kind."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.fixture
def monitoring(control_plane: ControlPlane) -> Iterator[None]:
    """The API server knows the kinds of the Prometheus operator; other tests want it not to."""
    documents = [definition(plural, kind) for plural, kind in MONITORING.items()]
    control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
    names = [document["metadata"]["name"] for document in documents]
    control_plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", *names)
    yield
    control_plane.kubectl("delete", "crd", *names, "--ignore-not-found", "--timeout=60s")


@pytest.fixture
def volumes(control_plane: ControlPlane, namespace: str) -> Iterator[None]:
    """What a provisioner would make: a volume for each member of etcd, and one with the model."""
    claims = {"models": "models"} | {f"etcd-{slot}": f"data-production-etcd-{slot}" for slot in range(3)}
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteOnce", "ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": f"/nowhere/{name}"},
            },
        }
        for name in claims
    ]
    wanted = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "10Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
    }
    control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([*documents, claim | {"spec": wanted}]))
    yield
    names = [document["metadata"]["name"] for document in documents]
    control_plane.kubectl("delete", "pv", *names, "--wait=false")


@pytest.fixture
def operator(control_plane: ControlPlane, monitoring: None) -> Iterator[OperatorProcess]:
    install_definition(control_plane)
    install_rights(control_plane, OPERATOR)
    where = f"--operator_namespace={OPERATOR_NAMESPACE}"
    with OperatorProcess(control_plane.kubeconfig_of(OPERATOR), where, identity="one") as process:
        yield process


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[HollowNodes]:
    with HollowNodes(control_plane.api, 4, shape=NODE) as running:
        yield running


def conditions(tenant: Tenant) -> dict[str, str]:
    body = tenant.cluster("production")
    generation = body["metadata"]["generation"]
    found = body.get("status", {}).get("conditions", [])
    return {item["type"]: item["status"] for item in found if item["observedGeneration"] == generation}


def versions(tenant: Tenant) -> dict[str, str]:
    """Of the cluster and its children."""
    return {**tenant.versions(), "itself": tenant.cluster("production")["metadata"]["resourceVersion"]}


def rested(tenant: Tenant) -> dict[str, str] | None:
    """The versions, if they stay for a while."""
    before = versions(tenant)
    time.sleep(2)
    return before if versions(tenant) == before else None


def wanted_children() -> set[str]:
    """What a dry run says that the example needs."""
    command = [sys.executable, "-m", "kvtier_operator.controller.main", "--dry-run", str(EXAMPLE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": ""}).stdout
    return {f"{found['kind']}/{found['metadata']['name']}" for found in yaml.safe_load_all(printed)}


def revisions_apart(names: Iterable[str]) -> set[str]:
    """The id of the model follows the namespace, and the name of a revision follows the id."""
    return {re.sub(r"(/production-engine)-[0-9a-f]+", r"\1-REVISION", name) for name in names}


@pytest.mark.usefixtures("volumes")
def test_the_example_for_production_becomes_ready_rests_and_ends_in_order(
    control_plane: ControlPlane, namespace: str, nodes: HollowNodes, operator: OperatorProcess
) -> None:
    tenant = Tenant(control_plane, namespace, f"{KINDS},servicemonitors,prometheusrules")
    tenant.kubectl("apply", "-f", str(EXAMPLE))
    with answering_masters(control_plane, nodes, namespace, "production", {"dram": 4, "spare": 2}):
        wait_for("Ready", lambda: conditions(tenant).get("Ready") == "True")
        ledger = "ConfigMap/production-ports"
        assert revisions_apart(tenant.children()) == revisions_apart({*wanted_children(), ledger})
        wrong = {name: said for name, said in conditions(tenant).items() if (said == "True") is (name in BAD)}
        assert wrong == {"TransportPlaintext": "True"}
        table = tenant.kubectl("get", "kvc").splitlines()[1]
        assert table.split()[:2] == ["production", "Ready"]

        before = wait_for("that nothing changes any more", lambda: rested(tenant))
        tenant.kubectl("apply", "-f", str(EXAMPLE))
        time.sleep(3)
        assert versions(tenant) == before
        assert f"pass failed cluster={namespace}/" not in operator.log()

        # Whoever takes the Prometheus operator away takes the definitions along, and nothing else.
        control_plane.kubectl("delete", "crd", *(f"{plural}.monitoring.coreos.com" for plural in MONITORING))
        tenant.kubectl("delete", "svc", "production-api")
        Tenant(control_plane, namespace).wait_for_child("Service/production-api")
        wait_for("Ready", lambda: conditions(tenant).get("Ready") == "True")

        tenant.kubectl("delete", "kvc", "production", "--wait=false")
        wait_for("the end", lambda: not tenant.cluster("production"))
        assert not tenant.kubectl("get", "pods", "-l", OURS, "-o", "name")
    assert operator.running
