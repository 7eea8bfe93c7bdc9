"""Rollouts and deletion of a cluster by the operator as a process, on a real API server with its real controllers."""

from __future__ import annotations

import time
from fnmatch import fnmatch
from typing import Any

import pytest
from kvtier_operator.api import parse
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.installation import small_cluster
from kvtier_operator.testing.operator_process import OperatorProcess
from kvtier_operator.testing.tenant import Tenant
from kvtier_operator.testing.waiting import wait_for

ROLE = {"name": "engine", "type": "Fused", "port": 8013, "replicas": 2, "tiers": {"device": {"size": "256Mi"}}}

pytestmark = pytest.mark.apiserver


def manifest(image: str, **spec: Any) -> dict[str, Any]:
    return small_cluster("qwen", roles=[ROLE], images={"engine": image}, **spec)


def pods_of(image: str, namespace: str) -> str:
    """Glob for the engines of one image."""
    document = manifest(image)
    document["metadata"]["namespace"] = namespace
    return f"{namespace}/qwen-engine-{revision_of(parse(document))}-*"


def sizes(tenant: Tenant) -> dict[str, int]:
    """Replicas of each set of engines, by its image."""
    return {image: item["spec"]["replicas"] for image, item in sets(tenant).items()}


def sets(tenant: Tenant) -> dict[str, dict[str, Any]]:
    """Each set of engines, by its image."""
    return {item["spec"]["template"]["spec"]["containers"][0]["image"]: item for item in tenant.items("sts")}


def test_a_new_revision_takes_over_unit_by_unit_and_the_former_one_is_kept(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(manifest("engine:1"))
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    hollow_nodes.hold(pods_of("engine:2", tenant.namespace))
    tenant.apply(manifest("engine:2"))
    wait_for("the first unit", lambda: sizes(tenant) == {"engine:1": 1, "engine:2": 1})
    time.sleep(2)
    assert sizes(tenant) == {"engine:1": 1, "engine:2": 1}
    assert tenant.is_true("qwen", "Available")
    hollow_nodes.release()
    wait_for("the end", lambda: sizes(tenant) == {"engine:1": 0, "engine:2": 2})
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    lanes = {item["metadata"]["labels"]["kvtier.dev/lane"] for item in tenant.items("sts")}
    assert lanes == {"A", "B"}
    tenant.apply(manifest("engine:3"))
    wait_for("only one former revision", lambda: sizes(tenant) == {"engine:2": 0, "engine:3": 2})


def test_a_failed_pod_halts_the_rollout_and_the_spec_taken_back_ends_it(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    tenant.apply(manifest("engine:1"))
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    good = sets(tenant)["engine:1"]["metadata"]["name"]
    hollow_nodes.fail(pods_of("engine:2", tenant.namespace))
    tenant.apply(manifest("engine:2"))
    wait_for("RolloutHalted", lambda: tenant.is_true("qwen", "RolloutHalted"))
    assert sizes(tenant) == {"engine:1": 1, "engine:2": 1}
    hollow_nodes.release()
    time.sleep(2)
    assert tenant.is_true("qwen", "RolloutHalted")
    assert sizes(tenant) == {"engine:1": 1, "engine:2": 1}
    tenant.apply(manifest("engine:1"))
    wait_for("the former revision", lambda: sizes(tenant) == {"engine:1": 2, "engine:2": 0})
    assert sets(tenant)["engine:1"]["metadata"]["name"] == good
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))


def test_a_supervised_rollout_begins_with_the_approval(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    assert hollow_nodes.names
    tenant.apply(manifest("engine:1", rollout={"policy": "Supervised"}))
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    tenant.apply(manifest("engine:2", rollout={"policy": "Supervised"}))

    def updating() -> str:
        return str(tenant.items("kvc")[0]["status"].get("revisions", {}).get("updating", ""))

    wait_for("a revision to approve", lambda: bool(updating()))
    assert list(sizes(tenant)) == ["engine:1"]
    tenant.kubectl("annotate", "kvc", "qwen", f"kvtier.dev/approve={updating()}")
    wait_for("the end", lambda: sizes(tenant) == {"engine:1": 0, "engine:2": 2})


def test_a_drained_deletion_stops_the_engines_before_the_object_goes(
    tenant: Tenant, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    assert hollow_nodes.names
    tenant.apply(manifest("engine:1", deletion={"policy": "Drain"}))
    wait_for("Ready", lambda: tenant.is_true("qwen", "Ready"))
    assert tenant.items("kvc")[0]["metadata"]["finalizers"] == ["kvtier.dev/drain"]
    tenant.kubectl("delete", "kvc", "qwen", "--wait=false")
    wait_for("the end", lambda: not tenant.items("kvc"))
    assert not [item for item in tenant.items("pods") if fnmatch(item["metadata"]["name"], "qwen-engine-*")]
