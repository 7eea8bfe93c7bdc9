"""Rollouts and deletion of a cluster by the operator as a process, on a real API server with its real controllers."""

from __future__ import annotations

import json
import time
from fnmatch import fnmatch
from typing import Any

import pytest
import yaml
from kvtier_operator.api import parse
from kvtier_operator.planning.revision import revision_of
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.installation import (
    small_cluster,
)
from kvtier_operator.testing.operator_process import OperatorProcess
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


class Seen:
    """What the namespace holds."""

    def __init__(self, installed: ControlPlane, namespace: str) -> None:
        self._installed, self._namespace = installed, namespace

    def apply(self, document: dict[str, Any]) -> None:
        self._installed.kubectl("apply", "-n", self._namespace, "-f", "-", stdin=yaml.safe_dump(document))

    def items(self, kinds: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(
            self._installed.kubectl("get", kinds, "-n", self._namespace, "-o", "json")
        )["items"]
        return listed

    def sizes(self) -> dict[str, int]:
        """Replicas of each set of engines, by its image."""
        return {
            item["spec"]["template"]["spec"]["containers"][0]["image"]: item["spec"]["replicas"]
            for item in self.items("sts")
        }

    def set_of(self, image: str) -> str:
        images = {
            item["spec"]["template"]["spec"]["containers"][0]["image"]: item["metadata"]["name"]
            for item in self.items("sts")
        }
        return str(images[image])

    def holds(self, condition: str) -> bool:
        for item in self.items("kvc"):
            for found in item.get("status", {}).get("conditions", ()):
                current = found["observedGeneration"] == item["metadata"]["generation"]
                if found["type"] == condition and found["status"] == "True" and current:
                    return True
        return False


def test_a_new_revision_takes_over_unit_by_unit_and_the_former_one_is_kept(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    seen = Seen(installed, namespace)
    seen.apply(manifest("engine:1"))
    wait_for("Ready", lambda: seen.holds("Ready"))
    hollow_nodes.hold(pods_of("engine:2", namespace))
    seen.apply(manifest("engine:2"))
    wait_for("the first unit", lambda: seen.sizes() == {"engine:1": 1, "engine:2": 1})
    time.sleep(2)
    assert seen.sizes() == {"engine:1": 1, "engine:2": 1}
    assert seen.holds("Available")
    hollow_nodes.release()
    wait_for("the end", lambda: seen.sizes() == {"engine:1": 0, "engine:2": 2})
    wait_for("Ready", lambda: seen.holds("Ready"))
    lanes = {item["metadata"]["labels"]["kvtier.dev/lane"] for item in seen.items("sts")}
    assert lanes == {"A", "B"}
    seen.apply(manifest("engine:3"))
    wait_for("only one former revision", lambda: seen.sizes() == {"engine:2": 0, "engine:3": 2})


def test_a_failed_pod_halts_the_rollout_and_the_spec_taken_back_ends_it(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    seen = Seen(installed, namespace)
    seen.apply(manifest("engine:1"))
    wait_for("Ready", lambda: seen.holds("Ready"))
    good = seen.set_of("engine:1")
    hollow_nodes.fail(pods_of("engine:2", namespace))
    seen.apply(manifest("engine:2"))
    wait_for("RolloutHalted", lambda: seen.holds("RolloutHalted"))
    assert seen.sizes() == {"engine:1": 1, "engine:2": 1}
    hollow_nodes.release()
    time.sleep(2)
    assert seen.holds("RolloutHalted")
    assert seen.sizes() == {"engine:1": 1, "engine:2": 1}
    seen.apply(manifest("engine:1"))
    wait_for("the former revision", lambda: seen.sizes() == {"engine:1": 2, "engine:2": 0})
    assert seen.set_of("engine:1") == good
    wait_for("Ready", lambda: seen.holds("Ready"))


def test_a_supervised_rollout_begins_with_the_approval(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    assert hollow_nodes.names
    seen = Seen(installed, namespace)
    seen.apply(manifest("engine:1", rollout={"policy": "Supervised"}))
    wait_for("Ready", lambda: seen.holds("Ready"))
    seen.apply(manifest("engine:2", rollout={"policy": "Supervised"}))

    def updating() -> str:
        return str(seen.items("kvc")[0]["status"].get("revisions", {}).get("updating", ""))

    wait_for("a revision to approve", lambda: bool(updating()))
    assert list(seen.sizes()) == ["engine:1"]
    installed.kubectl("annotate", "kvc", "qwen", "-n", namespace, f"kvtier.dev/approve={updating()}")
    wait_for("the end", lambda: seen.sizes() == {"engine:1": 0, "engine:2": 2})


def test_a_drained_deletion_stops_the_engines_before_the_object_goes(
    installed: ControlPlane, namespace: str, hollow_nodes: HollowNodes, operator: OperatorProcess
) -> None:
    assert operator.running
    assert hollow_nodes.names
    seen = Seen(installed, namespace)
    seen.apply(manifest("engine:1", deletion={"policy": "Drain"}))
    wait_for("Ready", lambda: seen.holds("Ready"))
    assert seen.items("kvc")[0]["metadata"]["finalizers"] == ["kvtier.dev/drain"]
    installed.kubectl("delete", "kvc", "qwen", "-n", namespace, "--wait=false")
    wait_for("the end", lambda: not seen.items("kvc"))
    assert not [item for item in seen.items("pods") if fnmatch(item["metadata"]["name"], "qwen-engine-*")]
