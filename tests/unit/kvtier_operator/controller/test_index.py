"""Unit tests of the index: slim records by cluster, and which clusters news wakes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.controller.index import ClusterKey, Index, Record, record_of
from kvtier_operator.labels import CLUSTER, MANAGED_BY, MANAGER
from kvtier_operator.observed import ObjectRef

LLM = ClusterKey("llm", "qwen")
NAME = ObjectRef("Service", "qwen-master")


def service(version: int, *, cluster: str = "qwen", uid: str = "u1", **more: Any) -> dict[str, Any]:
    meta = {
        "name": "qwen-master",
        "namespace": "llm",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {MANAGED_BY: MANAGER, CLUSTER: cluster},
        "managedFields": [{"manager": "x" * 1000}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"clusterIP": "None"}} | more


def record(version: int, **more: Any) -> Record:
    return record_of("Service", service(version, **more))


def test_a_record_keeps_the_object_without_status_and_managed_fields() -> None:
    live = record(5, status={"loadBalancer": {}}).live()
    assert live["spec"] == {"clusterIP": "None"}
    assert "status" not in live
    assert set(live["metadata"]) == {"name", "namespace", "uid", "labels"}


def test_a_workload_keeps_of_its_status_only_what_its_controller_has_seen() -> None:
    meta = {"name": "w", "namespace": "llm", "uid": "u", "resourceVersion": "1", "generation": 2}
    status = {"observedGeneration": 1, "replicas": 3, "readyReplicas": 2}
    assert record_of("StatefulSet", {"metadata": meta, "status": status}).live()["status"] == {"observedGeneration": 1}
    assert "status" not in record_of("StatefulSet", {"metadata": meta, "status": {}}).live()


def test_a_cluster_keeps_its_own_status() -> None:
    body = {
        "metadata": {"name": "qwen", "namespace": "llm", "uid": "c", "resourceVersion": "1"},
        "status": {"phase": "Ready"},
    }
    found = record_of("KVCacheCluster", body)
    assert found.live()["status"] == {"phase": "Ready"}
    assert found.home == LLM


def test_news_wakes_the_cluster_and_what_is_known_does_not() -> None:
    index = Index()
    assert index.put(record(5)) == (LLM,)
    assert index.put(record(5)) == ()
    assert index.put(record(7, status={"only": "status"})) == ()
    assert index.put(record(8, spec={"clusterIP": "10.0.0.1"})) == (LLM,)


def test_a_late_watch_event_does_not_replace_what_the_operator_wrote_since() -> None:
    index = Index()
    index.put(record(8, spec={"replicas": 2}))
    assert index.put(record(6, spec={"replicas": 1})) == ()
    found = index.find("llm", NAME)
    assert found is not None
    assert found.live()["spec"] == {"replicas": 2}


def test_a_late_deletion_does_not_remove_the_object_that_was_made_since() -> None:
    index = Index()
    index.put(record(8, uid="new"))
    assert index.remove("llm", NAME, "old") == ()
    assert index.find("llm", NAME) is not None
    assert index.remove("llm", NAME, "new") == (LLM,)
    assert index.find("llm", NAME) is None


def test_an_object_that_changes_hands_wakes_both_clusters() -> None:
    index = Index()
    index.put(record(1))
    assert set(index.put(record(2, cluster="other"))) == {LLM, ClusterKey("llm", "other")}
    assert not list(index.of(LLM))


def test_the_owner_says_whose_an_object_is_even_if_the_label_was_edited() -> None:
    body = service(1, cluster="forged")
    body["metadata"]["ownerReferences"] = [{"kind": "KVCacheCluster", "name": "qwen", "uid": "c", "controller": True}]
    assert record_of("Service", body).home == LLM


def test_a_workload_tells_its_newest_template_and_a_deployment_when_it_is_done() -> None:
    meta = {"name": "w", "namespace": "llm", "uid": "u", "resourceVersion": "1", "generation": 2}
    workload = record_of("StatefulSet", {"metadata": meta, "status": {"updateRevision": "w-abc"}})
    assert workload.newest == "w-abc"
    done = {"observedGeneration": 2, "updatedReplicas": 2, "replicas": 2}
    for status, settled in ((done, True), (done | {"observedGeneration": 1}, False), (done | {"replicas": 3}, False)):
        body = {"metadata": meta, "spec": {"replicas": 2}, "status": status}
        assert record_of("Deployment", body).settled is settled


def test_clusters_are_those_whose_own_object_is_known() -> None:
    index = Index()
    index.put(record(1))
    assert index.clusters() == []
    index.put(
        record_of(
            "KVCacheCluster", {"metadata": {"name": "qwen", "namespace": "llm", "uid": "c", "resourceVersion": "2"}}
        )
    )
    assert index.clusters() == [LLM]


def test_a_child_takes_well_below_two_kilobytes() -> None:
    spec = {"template": {"spec": {"containers": [{"name": "engine", "args": [f"--flag_{n}={n}" for n in range(60)]}]}}}
    assert len(record(1, spec=spec).packed) < 1000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.booleans()), max_size=40))
def test_any_order_of_events_ends_with_the_newest_version(events: list[tuple[int, int, bool]]) -> None:
    index, newest = Index(), dict[str, int]()
    for number, version, spec in events:
        body = service(version, spec={"x": spec})
        body["metadata"]["name"] = name = f"s{number}"
        index.put(record_of("Service", body))
        newest[name] = max(version, newest.get(name, 0))
    assert {record.ref.name: record.version for record in index.of(LLM)} == newest
