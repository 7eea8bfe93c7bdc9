"""The custom resource definition on a real API server: what it takes, what it refuses and how it says so."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtier_operator.api.fields import Object, Rule, walk
from kvtier_operator.api.schema import DOCUMENT, SPEC
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.installation import install_definition

ROOT = Path(__file__).parents[2]
VALID = sorted((ROOT / "examples").glob("*.yaml"))
INVALID = sorted((ROOT / "examples" / "invalid").glob("*.yaml"))
EXPECT = re.compile(r"# expect: (\S+): (.*)")

pytestmark = pytest.mark.apiserver


@pytest.fixture(scope="module")
def crd(control_plane: ControlPlane) -> ControlPlane:
    install_definition(control_plane)
    return control_plane


@pytest.fixture(scope="module")
def answers(crd: ControlPlane) -> dict[str, str]:
    """What kubectl says to every invalid example; empty = it was taken."""
    return {path.stem: refusal(crd, "apply", "--dry-run=server", "-f", str(path)) for path in INVALID}


def refusal(crd: ControlPlane, *arguments: str, stdin: str = "") -> str:
    try:
        crd.kubectl(*arguments, stdin=stdin)
    except Exception as error:  # noqa: BLE001 - its text is the answer under test
        return str(error)
    return ""


@pytest.mark.parametrize("side", ["--server-side=false", "--server-side=true"])
def test_an_accepted_example_stays_as_it_is_when_applied_again(crd: ControlPlane, namespace: str, side: str) -> None:
    apply = ("apply", "-n", namespace, side, *(f"--filename={path}" for path in VALID))
    crd.kubectl(*apply)
    before = versions(crd, namespace)
    assert len(before) == len(VALID)
    crd.kubectl(*apply)
    assert versions(crd, namespace) == before


def versions(crd: ControlPlane, namespace: str) -> dict[str, str]:
    items = json.loads(crd.kubectl("get", "kvc", "-n", namespace, "-o", "json"))["items"]
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in items}


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_an_invalid_example_is_refused_for_all_that_it_says(path: Path, answers: dict[str, str]) -> None:
    text, answer = path.read_text(), answers[path.stem]
    if "# by: webhook" in text:
        assert answer == ""
        return
    for field, fragment in EXPECT.findall(text):
        assert fragment in answer
        assert field.partition("[")[0].partition(".pod.")[0] in answer


def test_every_rule_has_an_example_that_it_refuses(answers: dict[str, str]) -> None:
    everything = "\n".join(answers.values())
    for rule in rules():
        if "oldSelf" not in rule.cel:
            assert any(text in everything for text in (rule.message, longest_literal(rule.expression))), rule.message


def rules() -> Iterator[Rule]:
    for described in (DOCUMENT, SPEC):
        assert isinstance(described, Object)
        yield from described.rules
    for _, field in walk(SPEC):
        yield from field.rules


def longest_literal(expression: str) -> str:
    return max(re.findall(r"'([^']*)'", expression), key=len, default="\0")


def cluster(**spec: Any) -> str:
    document = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "changing"},
        "spec": {
            "model": {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}},
            "roles": [{"name": "engine"}],
            **spec,
        },
    }
    return yaml.safe_dump(document)


def managed(**fields: Any) -> dict[str, Any]:
    return {"etcd": {"managed": {"replicas": 3, "storage": {"size": "1Gi"}, **fields}}}


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"clusterID": "b", "coordination": managed()}, "is a already and cannot be changed"),
        ({"coordination": managed()}, "is a already and cannot be changed"),
        ({"clusterID": "a"}, "masters would forget every object"),
        (
            {"clusterID": "a", "coordination": {"etcd": {"external": {"endpoints": ["etcd:2379"]}}}},
            "masters would forget every object",
        ),
        ({"clusterID": "a", "coordination": managed(replicas=5)}, "members join an etcd only when it is made"),
        ({"clusterID": "a", "coordination": managed(storage={"size": "2Gi"})}, "volumes of a running etcd"),
        ({"clusterID": "a", "coordination": managed(), "master": {"replicas": 3}}, ""),
    ],
)
def test_what_cannot_change_is_kept(crd: ControlPlane, namespace: str, change: dict[str, Any], answer: str) -> None:
    crd.kubectl("apply", "-n", namespace, "-f", "-", stdin=cluster(clusterID="a", coordination=managed()))
    said = refusal(crd, "apply", "-n", namespace, "-f", "-", stdin=cluster(**change))
    assert (answer in said) if answer else not said


@pytest.mark.parametrize(
    ("made_with", "change", "answer"),
    [
        ({}, {"clusterID": "a"}, "was not chosen when the cluster was made and cannot be changed"),
        ({"clusterID": ""}, {"clusterID": "a"}, "was not chosen when the cluster was made"),
        ({}, {"clusterID": "", "paused": True}, ""),
        ({}, {"paused": True}, ""),
        ({"clusterID": "a"}, {"clusterID": "a", "paused": True}, ""),
        ({"clusterID": "a"}, {"clusterID": ""}, "is a already and cannot be changed"),
    ],
)
def test_an_id_is_chosen_when_the_cluster_is_made_or_never(
    crd: ControlPlane, namespace: str, made_with: dict[str, Any], change: dict[str, Any], answer: str
) -> None:
    crd.kubectl("apply", "-n", namespace, "-f", "-", stdin=cluster(**made_with))
    said = refusal(crd, "apply", "-n", namespace, "-f", "-", stdin=cluster(**change))
    assert (answer in said) if answer else not said


def test_the_definition_explains_its_fields(crd: ControlPlane) -> None:
    assert "Use the store; needs the host tier." in crd.kubectl("explain", "kvc.spec.roles.tiers.store.enabled")
    assert "Tokens in a block." in crd.kubectl("explain", "kvc.spec.roles.settings.block_size")
    assert "DESCRIPTION" in crd.kubectl("explain", "kvc.status.leader", "--recursive")


def test_people_see_what_matters_at_a_glance(crd: ControlPlane, namespace: str) -> None:
    crd.kubectl("apply", "-n", namespace, "-f", str(ROOT / "examples" / "local.yaml"))
    status = {
        "observedGeneration": 1,
        "phase": "Ready",
        "engines": "1/1",
        "leader": {"pod": "local-master-0", "address": "10.0.0.1:20000", "viewVersion": 1},
        "store": {"ready": "1/1", "pools": [{"name": "dram", "desired": 1, "ready": 1}]},
        "model": {"effectiveID": "smollm2-135m"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "AllReady", "message": "everything is ready"}],
    }
    crd.kubectl(
        "patch",
        "kvc",
        "local",
        "-n",
        namespace,
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps({"status": status}),
    )
    head, row = crd.kubectl("get", "kvc", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "PHASE", "ENGINES", "LEADER", "STORE", "MODEL", "AGE"]
    assert row.split()[:6] == ["local", "Ready", "1/1", "local-master-0", "1/1", "smollm2-135m"]
    assert "everything is ready" in crd.kubectl("get", "kvc", "-n", namespace, "-o", "wide")
    kept = json.loads(crd.kubectl("get", "kvc", "local", "-n", namespace, "-o", "json"))["status"]
    assert kept == status
