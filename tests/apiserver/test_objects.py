"""Children on a real API server: it takes all of them, echoes what was written, and a second time changes nothing.

Their pods are admitted at the Pod Security level ``restricted``.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, parse
from kvtier_operator.dry_run import settled_layout
from kvtier_operator.kinds import CLUSTER_KIND, KINDS
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.drift import first_difference
from kvtier_operator.planning.layout import Layout
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.wants import allocate_blocks
from kvtier_operator.resources.objects.children import children
from kvtier_operator.testing.api_client import APPLY_PATCH
from kvtier_operator.testing.control_plane import ControlPlane

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted((ROOT / "tests" / "golden" / "clusters").glob("*.yaml"))
OBJECTS = sorted((ROOT / "tests" / "golden" / "objects").glob("*.yaml"))
PATIENCE_S = 20.0
RESTRICTED = "pod-security.kubernetes.io/enforce"


@pytest.fixture(scope="module")
def crd(control_plane: ControlPlane) -> ControlPlane:
    control_plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    control_plane.kubectl("wait", "--for=condition=Established", "crd/kvcacheclusters.kvtier.dev", "--timeout=20s")
    return control_plane


@pytest.fixture
def restricted(crd: ControlPlane) -> Iterator[str]:
    with crd.namespace() as name:
        crd.kubectl("label", "namespace", name, f"{RESTRICTED}=restricted")
        yield name


def build(cluster: KVCacheCluster, layout: Layout | None = None) -> list[Manifest]:
    widest = settled_layout(cluster)
    blocks = allocate_blocks(cluster, widest, Ledger(), frozenset(), now=0.0).blocks
    made = children(cluster, layout or widest, blocks, frozenset())
    return [item for items in made.values() for item in items]


def adopt(crd: ControlPlane, document: Mapping[str, Any], namespace: str) -> KVCacheCluster:
    """The manifest as a real object, so that its children have an owner and are not swept away."""
    meta = {"name": document["metadata"]["name"], "namespace": namespace}
    made = crd.api.create(CLUSTER_KIND.path(namespace), {**document, "metadata": meta})
    return parse(made)


def apply(crd: ControlPlane, intent: Manifest) -> dict[str, Any]:
    meta = intent["metadata"]
    path = KINDS[intent["kind"]].path(meta["namespace"], meta["name"])
    return crd.api.patch(f"{path}?fieldManager={labels.MANAGER}&force=true", intent, APPLY_PATCH)


def live(crd: ControlPlane, intent: Manifest) -> dict[str, Any]:
    meta = intent["metadata"]
    return crd.api.get(KINDS[intent["kind"]].path(meta["namespace"], meta["name"]))


def settle(crd: ControlPlane, intents: list[Manifest]) -> dict[str, str]:
    """Versions of the objects once the controllers have nothing more to say about them."""
    deadline = time.monotonic() + PATIENCE_S
    before: dict[str, str] = {}
    while True:
        seen = {
            f"{one['kind']}/{one['metadata']['name']}": live(crd, one)["metadata"]["resourceVersion"] for one in intents
        }
        if seen == before or time.monotonic() > deadline:
            return seen
        before = seen
        time.sleep(1.0)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_the_server_takes_every_object_on_file(path: Path, crd: ControlPlane, namespace: str) -> None:
    documents = [
        item for item in yaml.safe_load_all(path.read_text()) if "monitoring.coreos.com" not in item["apiVersion"]
    ]
    for item in documents:
        item["metadata"]["namespace"] = namespace
    text = yaml.safe_dump_all(documents)
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    answer = crd.kubectl(*arguments, stdin=text)
    assert len(answer.splitlines()) == len(documents)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_objects_come_back_as_they_were_written_and_a_second_time_changes_nothing(
    path: Path, crd: ControlPlane, namespace: str
) -> None:
    intents = build(adopt(crd, yaml.safe_load(path.read_text()), namespace))
    for intent in intents:
        echoed = apply(crd, intent)
        assert first_difference(intent, echoed) == ""
    before = settle(crd, intents)
    for intent in intents:
        assert first_difference(intent, live(crd, intent)) == ""
        apply(crd, intent)
    assert settle(crd, intents) == before


def test_pods_are_admitted_where_only_restricted_ones_are(crd: ControlPlane, restricted: str) -> None:
    document = yaml.safe_load((ROOT / "tests" / "golden" / "clusters" / "highly-available.yaml").read_text())
    described = adopt(crd, document, restricted)
    # Classes that this cluster has not would be refused for another reason.
    bare = replace(described.roles[0].pod, priority_class="", runtime_class="", service_account="")
    cluster = replace(described, roles=(replace(described.roles[0], pod=bare),))
    intents = build(cluster)
    for intent in intents:
        apply(crd, intent)
    wanted = sum(one["spec"]["replicas"] for one in intents if one["kind"] == "StatefulSet")
    deadline = time.monotonic() + PATIENCE_S
    while len(pods := names_of_pods(crd, restricted)) < wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(pods) == wanted


def names_of_pods(crd: ControlPlane, namespace: str) -> list[str]:
    items = json.loads(crd.kubectl("get", "pods", "-n", namespace, "-o", "json"))["items"]
    return [item["metadata"]["name"] for item in items]


def test_scaling_rolls_nothing(crd: ControlPlane, namespace: str) -> None:
    cluster = adopt(
        crd, yaml.safe_load((ROOT / "tests" / "golden" / "clusters" / "highly-available.yaml").read_text()), namespace
    )
    layout = settled_layout(cluster)
    for intent in build(cluster, replace(layout, pools=dict.fromkeys(layout.pools, 1), masters=2)):
        apply(crd, intent)
    before = revisions(crd, namespace)
    assert len(before) == 5
    for intent in build(cluster):
        apply(crd, intent)
    assert revisions(crd, namespace) == before


def revisions(crd: ControlPlane, namespace: str) -> dict[str, str]:
    """The hash that StatefulSets give their newest template, by set."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        items = crd.api.get(KINDS["StatefulSet"].path(namespace))["items"]
        current = [item for item in items if item["status"].get("observedGeneration") == item["metadata"]["generation"]]
        if len(current) == len(items) or time.monotonic() > deadline:
            return {item["metadata"]["name"]: item["status"].get("updateRevision", "") for item in items}
        time.sleep(0.2)
