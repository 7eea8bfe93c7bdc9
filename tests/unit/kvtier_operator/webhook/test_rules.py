from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.api import parse
from kvtier_operator.testing.memory_cluster import MemoryCluster
from kvtier_operator.webhook.review import answer, read_review
from kvtier_operator.webhook.rules import Verdict, judge
from kvtier_operator.webhook.run import WebhookOptions, make_webhook

EXAMPLES = Path(__file__).parents[4] / "examples"
SAMPLES = sorted((EXAMPLES / "invalid" / "webhook").glob("*.yaml"))

Document = dict[str, Any]


def manifest(
    name: str = "demo", *, host: bool = False, start: int = 20000, size: int = 2000, port: int = 8010, **spec: Any
) -> Document:
    tiers = {"device": {"size": "256Mi"}, "host": {"blocksFactor": "4"}, "store": {"enabled": True}}
    role = {"name": "engine", "type": "Fused", "port": port, "tiers": tiers}
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheCluster",
        "metadata": {"name": name, "namespace": "llm", "uid": f"uid-{name}"},
        "spec": {
            "store": {"pools": [{"name": "dram", "replicas": 2, "segmentSize": "1Gi"}]},
            "transport": {"hostNetwork": host, "ports": {"range": {"start": start, "size": size}}},
            "model": {"source": {"uri": "pvc://models/m"}, "identity": {"id": "tiny"}},
            "roles": [role],
            **spec,
        },
    }


def changed(document: Document, path: str, value: object) -> Document:
    result = copy.deepcopy(document)
    *parents, last = path.split(".")
    place: Any = result
    for step in parents:
        place = place[int(step)] if step.isdecimal() else place.setdefault(step, {})
    if last.isdecimal():
        place[int(last)] = value
    else:
        place[last] = value
    return result


def test_a_right_object_comes_in_without_a_word() -> None:
    assert judge(manifest(), None, ()) == Verdict()


def test_everything_that_is_wrong_comes_in_one_answer() -> None:
    wrong = changed(changed(manifest(), "spec.master", {"replicas": 3}), "spec.roles.0.settings", {"blocksize": 64})
    paths = [one.path for one in judge(wrong, None, ()).violations]
    assert paths == ["spec.roles[0].settings.blocksize", "spec.master.replicas"]


def test_a_range_that_a_rollout_would_exhaust_is_refused_with_the_size_it_needs() -> None:
    needed = 2 + 2 * 11 + 2 * 6
    (violation,) = judge(manifest(size=needed - 1), None, ()).violations
    assert str(violation).startswith(f"spec.transport.ports.range.size = {needed - 1}: the pods need {needed} ports")
    assert judge(manifest(size=needed), None, ()) == Verdict()


def test_two_clusters_on_the_host_network_need_different_http_ports() -> None:
    other = parse(manifest("other", host=True, start=24000))
    (violation,) = judge(manifest(host=True), None, [other]).violations
    assert violation.path == "spec.roles[0].port"
    assert "spec.roles[0].port of llm/other" in violation.fix
    assert judge(manifest(host=True, port=8011), None, [other]) == Verdict()
    assert judge(manifest(), None, [other]) == Verdict()


def test_http_ports_stay_out_of_everybodys_range_on_the_host_network() -> None:
    other = parse(manifest("other", host=True, start=8000, size=1000, port=9500))
    mine = judge(manifest(host=True), None, [other]).violations
    (violation,) = mine
    assert str(violation).startswith("spec.roles[0].port = 8010: lies in the range 8000-8999 of llm/other, which is")
    theirs = judge(manifest(host=True, start=9000, size=1000), None, [parse(manifest("other", host=True, port=9500))])
    assert [one.path for one in theirs.violations] == ["spec.transport.ports.range"]


def test_routers_have_addresses_of_their_own_also_where_engines_are_on_the_host_network() -> None:
    tiers = {"device": {"size": "256Mi"}, "host": {"blocksFactor": "4"}, "store": {"enabled": True}}

    def split(name: str, start: int, port: int) -> Document:
        roles = [
            {"name": kind.lower(), "type": kind, "port": port + number, "tiers": tiers}
            for number, kind in enumerate(("Prefill", "Decode"))
        ]
        return manifest(name, host=True, start=start, roles=roles, engine={"dialect": "Xllm"}, router={"port": 31000})

    other = parse(split("other", 24000, 9000))
    assert judge(split("demo", 20000, 9100), None, [other]) == Verdict()


def test_ranges_that_overlap_are_a_warning_since_the_ledger_keeps_blocks_apart() -> None:
    other = parse(manifest("other", host=True, start=21000, port=9000))
    verdict = judge(manifest(host=True), None, [other])
    assert verdict.violations == ()
    assert verdict.warnings == (
        "spec.transport.ports.range 20000-21999 is shared with llm/other (21000-22999); ports may run out",
    )


def test_an_object_whose_spec_stays_comes_in_even_if_rules_have_become_stricter() -> None:
    old = changed(manifest(), "spec.master", {"replicas": 3})
    freed = changed(old, "metadata.finalizers", [])
    assert judge(freed, old, ()) == Verdict()
    assert judge(changed(freed, "spec.paused", True), old, ()).violations


def test_weights_that_change_under_one_id_are_a_warning() -> None:
    explicit = changed(manifest(), "spec.model.namespacePolicy", "Explicit")
    new_weights = changed(explicit, "spec.model.identity.weightsDigest", "sha256:" + "a" * 64)
    (warning,) = judge(new_weights, explicit, ()).warnings
    assert "answers will be wrong" in warning
    (moved,) = judge(changed(manifest(), "spec.model.source.uri", "pvc://models/n"), manifest(), ()).warnings
    assert "blocks keep the id tiny" in moved


def test_a_new_namespace_of_keys_is_a_warning() -> None:
    (warning,) = judge(changed(manifest(), "spec.model.identity.id", "other"), manifest(), ()).warnings
    assert warning == "the store's keys move from tiny to other: blocks written so far are out of reach"


def test_what_is_removed_or_replaced_is_a_warning() -> None:
    two = changed(manifest(), "spec.store.pools", [{"name": "big", "segmentSize": "2Gi"}])
    assert judge(two, manifest(), ()).warnings == (
        "pool dram is removed: its 2 nodes leave one by one (drain: Migrate)",
    )
    larger = changed(manifest(), "spec.store.pools.0.segmentSize", "2Gi")
    assert judge(larger, manifest(), ()).warnings == (
        "pool dram gets another segmentSize: its 2 nodes are replaced one by one",
    )
    renamed = changed(manifest(), "spec.roles.0.name", "serve")
    assert judge(renamed, manifest(), ()).warnings == ("role engine is removed: its 1 engines stop",)


def test_a_change_of_what_was_invalid_is_judged_like_a_new_object() -> None:
    assert judge(manifest(), changed(manifest(), "spec.master", {"replicas": 3}), ()) == Verdict()


def review(document: object, **more: object) -> Document:
    request = {"uid": "r1", "object": document, "operation": "CREATE", **more}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_the_answer_repeats_the_request_and_has_every_line() -> None:
    request = read_review(review(manifest()))
    assert request is not None
    assert request.before is None
    good = answer(request, Verdict(warnings=("mind the gap",)))
    assert good["response"] == {"uid": "r1", "allowed": True, "warnings": ["mind the gap"]}
    wrong = judge(changed(manifest(), "spec.roles.0.settings", {"blocksize": 1}), None, ())
    bad = answer(request, wrong)["response"]
    assert (bad["allowed"], bad["status"]["code"], bad["status"]["reason"]) == (False, 422, "Invalid")
    assert bad["status"]["message"].startswith(
        "KVCacheCluster llm/demo is invalid:\n* spec.roles[0].settings.blocksize"
    )


def test_the_former_object_comes_along_with_a_change() -> None:
    request = read_review(review(manifest(), oldObject=manifest(size=5)))
    assert request is not None
    assert request.before == manifest(size=5)
    new = read_review(review(manifest(), oldObject=None))
    assert new is not None
    assert new.before is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        review({"kind": "Pod"}),
        review(None),
        {**review(manifest()), "apiVersion": "admission.k8s.io/v1beta1"},
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": None},
    ],
)
def test_what_is_no_review_of_our_kind_is_none(body: object) -> None:
    assert read_review(body) is None


@pytest.mark.parametrize("metadata", [None, {}, {"name": 5}])
def test_an_object_without_a_usable_name_is_refused_and_not_an_error(metadata: object) -> None:
    document = {**manifest(), "metadata": metadata}
    assert judge(document, None, ()).violations


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_refused_by_the_door_for_what_it_says_and_by_nothing_before(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    parse(document)
    neighbour = parse(yaml.safe_load((EXAMPLES / "host-network.yaml").read_text()))
    found = {one.path: str(one) for one in judge(document, None, [neighbour]).violations}
    expected = dict(re.findall(r"# expect: (\S+): (.*)", path.read_text()))
    assert set(found) == set(expected)
    for named, fragment in expected.items():
        assert fragment in found[named]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_comes_in(path: Path) -> None:
    assert judge(yaml.safe_load(path.read_text()), None, ()) == Verdict()


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(_ANY, _ANY, st.sampled_from(["metadata", "spec", "spec.transport", "spec.roles", "spec.store", "spec.model"]))
def test_whatever_an_object_has_the_answer_is_a_verdict(value: object, before: object, path: str) -> None:
    request = read_review(review(changed(manifest(host=True), path, value), oldObject=before))
    assert request is not None
    others = [manifest("other", host=True), changed(manifest("x", host=True), "spec", value)]
    verdict = make_webhook(WebhookOptions(1, "h", "n"), lambda: others, MemoryCluster()).judge(request)
    assert answer(request, verdict)["response"]["allowed"] == (not verdict.violations)


def test_an_object_is_not_compared_with_itself_nor_with_invalid_ones() -> None:
    request = read_review(review(manifest(host=True)))
    assert request is not None
    known = [manifest(host=True), manifest("bad", host=True, roles=[]), manifest("elsewhere")]
    door = make_webhook(WebhookOptions(1, "h", "n"), lambda: known, MemoryCluster())
    assert door.judge(request) == Verdict()
    known.append(manifest("other", host=True))
    assert door.judge(request).violations
