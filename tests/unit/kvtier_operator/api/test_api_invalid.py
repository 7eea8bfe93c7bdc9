"""Every file of examples/invalid is refused for what its first lines say, and nothing but a SpecError ever comes."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.manifest import load

EXAMPLES = Path(__file__).parents[4] / "examples"
INVALID = sorted((EXAMPLES / "invalid").glob("*.yaml"))
EXPECT = re.compile(r"# expect: (\S+): (.*)")

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1Gi", "10s", "2.5", "a", "Prefill", "Xllm", "managed", "/x", "pvc://a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def expectations(path: Path) -> list[tuple[str, str]]:
    """Field path and fragment of message, from the comments at the top."""
    return EXPECT.findall(path.read_text())


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_an_invalid_example_is_refused_for_what_it_says(path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(path)
    found = {violation.path: str(violation) for violation in caught.value.violations}
    expected = dict(expectations(path))
    assert set(found) == set(expected)
    for field, fragment in expected.items():
        assert fragment in found[field]


def test_there_are_invalid_examples_and_each_says_who_refuses_it() -> None:
    assert len(INVALID) > 50
    for path in INVALID:
        assert expectations(path), path
        assert re.search(r"^# by: (crd|webhook)$", path.read_text(), re.MULTILINE), path


@given(JSON)
@settings(max_examples=100)
def test_no_document_at_all_gets_past_the_parser_with_another_error(document: Any) -> None:
    with pytest.raises(SpecError):
        parse(document)


@given(st.data())
@settings(max_examples=120)
def test_whatever_stands_in_a_field_the_answer_is_records_or_violations(data: st.DataObject) -> None:
    document = deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 3))):
        replace_one(document, data)
    violations: tuple[Violation, ...] = ()
    try:
        parse(document)
    except SpecError as error:
        violations = error.violations
    assert all(violation.fix for violation in violations)


def replace_one(document: Any, data: st.DataObject) -> None:
    """Put any value at one place of a document, or a new field."""
    at = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.integers(0, 4)):
            at = at[key]
            continue
        at[key] = data.draw(JSON)
        return
    if isinstance(at, dict):
        at[data.draw(st.text(max_size=5))] = data.draw(JSON)


POD = {
    "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": 2}},
    "tolerations": [{"key": "a"}],
    "labels": {"a": "b"},
    "env": {"A": "b"},
    "volumes": [{"name": "a", "emptyDir": {}}],
    "volumeMounts": [{"name": "a", "mountPath": "/a"}],
}
TIERS = {"device": {"size": "1Gi"}, "host": {"blocksFactor": "2"}, "store": {"enabled": True, "prefetch": {"batch": 8}}}
DOCUMENTS: list[dict[str, Any]] = [
    {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "demo", "generation": 1, "annotations": {"a": "b"}, "finalizers": ["a"]},
        "spec": {
            "clusterID": "demo",
            "engine": {"dialect": "Xllm"},
            "images": {"default": "a", "pullSecrets": [{"name": "a"}]},
            "coordination": {"etcd": {"managed": {"replicas": 3, "storage": {"size": "1Gi"}, "pod": POD}}},
            "master": {"replicas": 3, "leaseTTL": "10s", "durability": "OpLog"},
            "store": {"pools": [{"name": "dram", "segmentSize": "1Gi", "drain": {"timeout": "1m"}, "pod": POD}]},
            "transport": {"hostNetwork": True, "ports": {"range": {"start": 20000, "size": 100}}},
            "model": {"source": {"uri": "pvc://a/b"}, "identity": {"id": "a", "revision": "1"}},
            "roles": [
                {"name": "p", "type": "Prefill", "tiers": TIERS, "settings": {"block_size": 64}, "pod": POD},
                {"name": "d", "type": "Decode", "port": 8110, "tiers": TIERS, "termination": {"graceSeconds": 9}},
            ],
            "router": {"replicas": 2},
            "rollout": {"maxSurge": 1},
            "security": {"networkPolicy": {"allowFrom": {"a": "b"}}},
            "observability": {"labels": {"a": "b"}},
        },
    },
    {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": "demo"},
        "spec": {
            "coordination": {"etcd": {"external": {"endpoints": ["etcd:2379"]}}},
            "model": {"source": {"uri": "/models/tiny"}, "identity": {"id": "tiny"}},
            "roles": [{"name": "engine"}],
        },
    },
]


def test_the_documents_that_are_varied_are_valid() -> None:
    for document in DOCUMENTS:
        parse(document)
