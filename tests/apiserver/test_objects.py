"""Children on a real API server: it takes all of them, echoes what was written, and a second time changes nothing.

Their pods are admitted at the Pod Security level ``restricted``.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, parse
from kvtier_operator.controller.dry_run import settled_layout
from kvtier_operator.kinds import KINDS
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.drift import first_difference
from kvtier_operator.planning.layout import Layout
from kvtier_operator.testing.api_client import APPLY_PATCH
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.rendered import built

FOLDER = Path(__file__).parents[1] / "golden"
CLUSTERS = sorted(path.stem for path in (FOLDER / "clusters").glob("*.yaml"))
PATIENCE_S = 20.0
RESTRICTED = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def restricted(control_plane: ControlPlane) -> Iterator[str]:
    with control_plane.namespace() as name:
        control_plane.kubectl("label", "namespace", name, f"{RESTRICTED}=restricted")
        yield name


def build(cluster: KVCacheCluster, layout: Layout | None = None) -> list[Manifest]:
    return list(built(cluster, layout, frozenset()).values())


def read(name: str, namespace: str) -> KVCacheCluster:
    """A cluster of the goldens. It has no owner: one that does not exist would have its children swept away."""
    document = yaml.safe_load((FOLDER / "clusters" / f"{name}.yaml").read_text())
    return parse({**document, "metadata": {"name": document["metadata"]["name"], "namespace": namespace}})


def apply(control_plane: ControlPlane, intent: Manifest) -> dict[str, Any]:
    meta = intent["metadata"]
    path = KINDS[intent["kind"]].path(meta["namespace"], meta["name"])
    return control_plane.api.patch(f"{path}?fieldManager={labels.MANAGER}&force=true", intent, APPLY_PATCH)


def live(control_plane: ControlPlane, intent: Manifest) -> dict[str, Any]:
    meta = intent["metadata"]
    return control_plane.api.get(KINDS[intent["kind"]].path(meta["namespace"], meta["name"]))


def settle(control_plane: ControlPlane, intents: list[Manifest]) -> dict[str, str]:
    """Versions of the objects once the controllers have nothing more to say about them."""
    deadline = time.monotonic() + PATIENCE_S
    before: dict[str, str] = {}
    while True:
        found = {f"{one['kind']}/{one['metadata']['name']}": live(control_plane, one) for one in intents}
        seen = {name: one["metadata"]["resourceVersion"] for name, one in found.items()}
        if (seen == before and all(map(is_observed, found.values()))) or time.monotonic() > deadline:
            return seen
        before = seen
        time.sleep(1)


def is_observed(item: dict[str, Any]) -> bool:
    """Whether the controller that follows objects of its kind, if there is one, has seen it as it is."""
    followed = item["kind"] in {"StatefulSet", "Deployment", "PodDisruptionBudget"}
    return not followed or item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_server_takes_every_object_on_file(name: str, control_plane: ControlPlane, namespace: str) -> None:
    text = (FOLDER / "objects" / f"{name}.yaml").read_text()
    documents = [item for item in yaml.safe_load_all(text) if "monitoring.coreos.com" not in item["apiVersion"]]
    for item in documents:
        item["metadata"]["namespace"] = namespace
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    answer = control_plane.kubectl(*arguments, stdin=yaml.safe_dump_all(documents))
    assert len(answer.splitlines()) == len(documents)


@pytest.mark.parametrize("name", CLUSTERS)
def test_objects_come_back_as_they_were_written_and_a_second_time_changes_nothing(
    name: str, control_plane: ControlPlane, namespace: str
) -> None:
    intents = build(read(name, namespace))
    for intent in intents:
        echoed = apply(control_plane, intent)
        assert first_difference(intent, echoed) == ""
    before = settle(control_plane, intents)
    for intent in intents:
        assert first_difference(intent, live(control_plane, intent)) == ""
        apply(control_plane, intent)
    assert settle(control_plane, intents) == before


def test_pods_are_admitted_where_only_restricted_ones_are(control_plane: ControlPlane, restricted: str) -> None:
    described = read("highly-available", restricted)
    # Classes that this cluster has not would be refused for another reason.
    bare = replace(described.roles[0].pod, priority_class="", runtime_class="", service_account="")
    cluster = replace(described, roles=(replace(described.roles[0], pod=bare),))
    intents = build(cluster)
    for intent in intents:
        apply(control_plane, intent)
    wanted = sum(one["spec"]["replicas"] for one in intents if one["kind"] == "StatefulSet")
    deadline = time.monotonic() + PATIENCE_S
    while len(pods := names_of_pods(control_plane, restricted)) < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(pods) == wanted


def names_of_pods(control_plane: ControlPlane, namespace: str) -> list[str]:
    items = json.loads(control_plane.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    return [item["metadata"]["name"] for item in items]


def test_scaling_rolls_nothing(control_plane: ControlPlane, namespace: str) -> None:
    cluster = read("highly-available", namespace)
    layout = settled_layout(cluster)
    for intent in build(cluster, replace(layout, pools=dict.fromkeys(layout.pools, 1), masters=2)):
        apply(control_plane, intent)
    before = revisions(control_plane, namespace)
    assert len(before) == 5
    for intent in build(cluster):
        apply(control_plane, intent)
    assert revisions(control_plane, namespace) == before


def revisions(control_plane: ControlPlane, namespace: str) -> dict[str, str]:
    """The hash that StatefulSets give their newest template, by set."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        items = control_plane.api.get(KINDS["StatefulSet"].path(namespace))["items"]
        current = [item for item in items if item["status"].get("observedGeneration") == item["metadata"]["generation"]]
        if len(current) == len(items) or time.monotonic() > deadline:
            return {item["metadata"]["name"]: item["status"].get("updateRevision", "") for item in items}
        time.sleep(0.2)
