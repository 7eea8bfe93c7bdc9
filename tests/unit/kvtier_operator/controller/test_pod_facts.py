"""Unit tests of what the operator keeps of a pod."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator.api.units import seconds_of
from kvtier_operator.controller.pod_facts import PodFacts, pod_facts
from kvtier_operator.labels import (
    COMPONENT,
    DRAIN_JOB,
    DRAIN_SINCE,
    LEADER,
    MASTER_ROLE,
    POOL,
    REVISION,
    ROLE,
)
from kvtier_operator.observed import Component, ObservedPod

BORN = "2026-01-02T03:04:05Z"


def pod(
    labels: dict[str, str] | None = None,
    status: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "qwen-store-dram-3",
            "namespace": "llm",
            "uid": "p",
            "resourceVersion": "1",
            "creationTimestamp": BORN,
            "labels": {COMPONENT: "store", POOL: "dram", "controller-revision-hash": "h1"} | (labels or {}),
            "annotations": annotations or {},
            "ownerReferences": [{"name": "qwen-store-dram", "kind": "StatefulSet", "controller": True}],
            **meta,
        },
        "spec": {"nodeName": "n1"},
        "status": status or {},
    }


def facts(body: dict[str, Any]) -> PodFacts:
    found = pod_facts(body)
    assert found is not None
    return found


def seen(body: dict[str, Any], newest: str | None = "h1", now: float = 0.0) -> ObservedPod:
    return facts(body).observed(body["metadata"]["name"], "p", newest, now)


READY = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.7", "phase": "Running"}


def test_a_ready_pod_of_the_newest_template() -> None:
    found = seen(pod(status=READY))
    assert (found.component, found.group, found.slot) == (Component.STORE, "dram", 3)
    assert (found.ready, found.up_to_date, found.ip) == (True, True, "10.0.0.7")
    assert (found.failure, found.waiting, found.revision) == ("", "", "h1")


def test_a_pod_that_is_being_deleted_is_not_ready_and_waits_for_nothing() -> None:
    found = seen(pod(status=READY, deletionTimestamp=BORN))
    assert (found.ready, found.deleting, found.waiting) == (False, True, "")


def test_a_pod_of_an_older_template_is_out_of_date_unless_the_set_is_unknown() -> None:
    assert not seen(pod(status=READY), newest="h2").up_to_date
    assert seen(pod(status=READY), newest=None).up_to_date


def test_an_engine_has_the_revision_of_its_set_and_the_slot_of_its_label() -> None:
    labels = {COMPONENT: "engine", ROLE: "fused", REVISION: "1b9d", "apps.kubernetes.io/pod-index": "12"}
    found = seen(pod(labels))
    assert (found.group, found.revision, found.slot) == ("fused", "1b9d", 12)


def test_the_scheduler_s_words_say_why_a_pod_waits_and_since_when() -> None:
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}]
    found = seen(pod(status={"phase": "Pending", "conditions": conditions}), now=seconds_of(BORN) + 90)
    assert found.waiting == "Unschedulable: 0/3 nodes fit"
    assert found.waiting_s == pytest.approx(90)
    assert found.failure == ""


def test_a_crash_loop_is_a_failure_in_the_words_of_the_program() -> None:
    container = {
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"message": "PortBusy: 20001 held by\nnginx"}},
    }
    found = seen(pod(status={"containerStatuses": [container]}))
    assert found.failure == "CrashLoopBackOff: PortBusy: 20001 held by nginx"


def test_creating_a_container_is_no_failure() -> None:
    container = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    found = seen(pod(status={"containerStatuses": [container]}))
    assert (found.failure, found.waiting) == ("", "ContainerCreating")


def test_an_evicted_pod_has_failed() -> None:
    assert seen(pod(status={"phase": "Failed", "reason": "Evicted", "message": "low on memory"})).failure == (
        "Evicted: low on memory"
    )


def test_marks_of_leader_and_drain_are_kept() -> None:
    annotations = {DRAIN_JOB: "job-1", DRAIN_SINCE: "2026-01-02T03:04:05+00:00"}
    found = facts(pod({MASTER_ROLE: LEADER}, annotations=annotations))
    assert (found.leader, found.drain_job) == (True, "job-1")
    assert found.drain_since == seconds_of(BORN)


def test_a_pod_without_a_known_component_is_none_of_ours() -> None:
    assert pod_facts(pod({COMPONENT: "sidecar"})) is None


@given(st.text(max_size=30))
def test_no_timestamp_is_too_odd(text: str) -> None:
    assert isinstance(seconds_of(text), float)
