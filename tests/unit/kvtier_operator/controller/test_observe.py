"""Unit tests of the observation: what plans see of the index and of the masters' answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from kvtier_operator.api import KVCacheCluster, parse
from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.controller.masters import AdminAddress, DrainProgress, MastersView, Targets
from kvtier_operator.controller.observe import (
    NO_DRAIN_JOBS,
    Surroundings,
    ledger_place,
    observe,
    poll_targets,
)
from kvtier_operator.errors import LedgerError
from kvtier_operator.labels import (
    CLUSTER,
    COMPONENT,
    DRAIN_JOB,
    DRAIN_SINCE,
    LANE,
    MANAGED_BY,
    MANAGER,
    POOL,
    PORT_BLOCK,
    REVISION,
)
from kvtier_operator.names import HOST_LEDGER
from kvtier_operator.observed import Component, DrainPhase, MasterState, ObjectRef, Observed, observed_object
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ledger_data import ledger_data
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.testing.installation import stored_cluster

LEDGER = Ledger({BlockKey("llm.qwen.uid-c", "master", "", -1): Entry(PortBlock(20000, 20002))})
NOW = 1_767_225_700.0


class World:
    """An index that a test fills."""

    def __init__(self, **transport: Any) -> None:
        body = stored_cluster("qwen")
        body["metadata"] |= {"namespace": "llm", "uid": "uid-c", "resourceVersion": "1"}
        body["spec"]["transport"] |= transport
        self.cluster: KVCacheCluster = parse(body)
        self.index = Index()
        self._version = 1
        self.put("KVCacheCluster", "qwen", uid="uid-c", status={"phase": "Ready"})

    def put(self, kind: str, name: str, **more: Any) -> Sequence[ClusterKey]:
        self._version += 1
        meta = {
            "name": name,
            "namespace": more.pop("namespace", "llm"),
            "uid": more.pop("uid", f"uid-{name}"),
            "resourceVersion": str(self._version),
            "labels": {MANAGED_BY: MANAGER, CLUSTER: "qwen"} | more.pop("labels", {}),
            "annotations": more.pop("annotations", {}),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{"kind": "X", "name": more.pop("owner", "o"), "uid": "uid-c", "controller": True}],
        }
        if "generation" in more:
            meta["generation"] = more.pop("generation")
        return self.index.put(record_of(kind, {"kind": kind, "metadata": meta, **more}))

    def pod(self, name: str, component: str, ip: str, **more: Any) -> None:
        labels = {COMPONENT: component, "controller-revision-hash": more.pop("template", "t1")} | more.pop("labels", {})
        status = {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
        self.put("Pod", name, labels=labels, status=status, owner=name.rpartition("-")[0], **more)

    def see(self, **around: Any) -> Observed:
        return observe(self.cluster, self.index, "ops", Surroundings(now=NOW, **around))


def test_children_are_seen_and_the_ledger_is_none_of_them() -> None:
    world = World()
    world.put("StatefulSet", "qwen-master", spec={"replicas": 3}, annotations={"kvtier.dev/applied-hash": "h"})
    world.put("ConfigMap", "qwen-ports", data=ledger_data(LEDGER))
    found = world.see()
    assert set(found.objects) == {ObjectRef("StatefulSet", "qwen-master")}
    child = found.objects[ObjectRef("StatefulSet", "qwen-master")]
    assert (child.replicas, child.applied_hash, child.owner_uid) == (3, "h", "uid-c")
    assert found.ledger.entries == LEDGER.entries
    assert found.ledger.resource_version == str(world._version)
    assert found.status == {"phase": "Ready"}


def test_pods_are_out_of_date_when_their_set_has_a_newer_template() -> None:
    world = World()
    world.put("StatefulSet", "qwen-master", status={"updateRevision": "t2"})
    world.pod("qwen-master-0", "master", "10.0.0.1", template="t1")
    world.pod("qwen-master-1", "master", "10.0.0.2", template="t2")
    assert [pod.up_to_date for pod in world.see().pods_of(Component.MASTER)] == [False, True]


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_a_workload_is_unseen_until_its_controller_has_looked_at_its_newest_spec(kind: str) -> None:
    world, ref = World(), ObjectRef(kind, "qwen-x")
    world.put(kind, ref.name, generation=2, status={"observedGeneration": 1, "updateRevision": "t1"})
    assert world.see().objects[ref].unseen
    woken = world.put(kind, ref.name, generation=2, status={"observedGeneration": 2, "updateRevision": "t1"})
    assert not world.see().objects[ref].unseen
    assert woken, "nobody looks again when the controller has seen it"
    world.put(kind, ref.name, generation=1)
    assert world.see().objects[ref].unseen
    world.put("Service", ref.name, generation=1)
    assert not world.see().objects[ObjectRef("Service", ref.name)].unseen


def test_a_router_s_pods_are_up_to_date_when_their_deployment_is_done() -> None:
    world = World()
    labels = {COMPONENT: "router", "pod-template-hash": "x"}
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    world.put("Pod", "qwen-router-x-y", labels=labels, status=status, owner="qwen-router-x")
    world.put("Deployment", "qwen-router", spec={"replicas": 1}, status={"updatedReplicas": 1, "replicas": 2})
    assert [pod.up_to_date for pod in world.see().pods_of(Component.ROUTER)] == [False]
    world.put("Deployment", "qwen-router", spec={"replicas": 1}, status={"updatedReplicas": 1, "replicas": 1})
    assert [pod.up_to_date for pod in world.see().pods_of(Component.ROUTER)] == [True]


def test_masters_segments_and_foreign_objects_come_from_outside_the_index() -> None:
    theirs = observed_object(ObjectRef("Service", "qwen-api"), {"metadata": {"name": "qwen-api", "uid": "theirs"}})
    view = MastersView({"qwen-master-0": MasterState("qwen-master-0")}, None, {"qwen-store-dram-0": "x:1"}, {})
    found = World().see(view=view, foreign=(theirs,), optional_kinds=frozenset({"ServiceMonitor"}))
    assert found.objects[theirs.ref].owner_uid == ""
    assert set(found.masters) == {"qwen-master-0"}
    assert found.segments == {"qwen-store-dram-0"}
    assert found.optional_kinds == {"ServiceMonitor"}


@pytest.mark.parametrize(
    ("job", "phase"), [("1-7", DrainPhase.DONE), ("2-7", DrainPhase.RUNNING), (NO_DRAIN_JOBS, DrainPhase.UNSUPPORTED)]
)
def test_a_drain_is_what_the_pod_remembers_and_the_leader_says(job: str, phase: DrainPhase) -> None:
    world = World()
    marks = {DRAIN_JOB: job, DRAIN_SINCE: "2026-01-01T00:00:00+00:00"}
    world.pod("qwen-store-dram-0", "store", "10.0.0.1", annotations=marks)
    view = MastersView(drains={"1-7": DrainProgress(DrainPhase.DONE, "moved 3")})
    drain = world.see(view=view).drains["qwen-store-dram-0"]
    assert (drain.phase, drain.job) == (phase, job)
    assert drain.running_s == pytest.approx(100)


def test_a_ledger_that_cannot_be_trusted_is_an_error_and_not_an_empty_one() -> None:
    world = World()
    world.put("ConfigMap", "qwen-ports", data={"llm.qwen.uid-c": "nonsense"})
    with pytest.raises(LedgerError, match="nonsense"):
        world.see()


def test_clusters_on_the_host_network_share_one_ledger() -> None:
    world = World(hostNetwork=True)
    assert ledger_place(world.cluster, "ops") == ("ops", HOST_LEDGER)
    world.put("ConfigMap", HOST_LEDGER, namespace="ops", data=ledger_data(LEDGER), labels={CLUSTER: ""}, owner="")
    assert world.see().ledger.entries == LEDGER.entries


def test_masters_are_asked_at_the_port_that_their_set_names() -> None:
    world = World()
    world.pod("qwen-master-0", "master", "10.0.0.1")
    assert poll_targets(world.cluster, world.index) == Targets()
    world.put("StatefulSet", "qwen-master", annotations={PORT_BLOCK: "-1:20000-20001"})
    world.pod("qwen-master-1", "master", "")
    world.pod("qwen-store-dram-0", "store", "10.0.0.9", labels={POOL: "dram"}, annotations={DRAIN_JOB: "1-7"})
    found = poll_targets(world.cluster, world.index)
    assert found.masters == {"qwen-master-0": AdminAddress("10.0.0.1", 20001)}
    assert found.stores == {"qwen-store-dram-0": "qwen-store-dram-0", "10.0.0.9": "qwen-store-dram-0"}
    assert found.jobs == {"1-7"}


@pytest.mark.parametrize("edit", [{}, {COMPONENT: "engine"}, {POOL: "other"}, {LANE: "B"}, {REVISION: "other"}])
def test_labels_of_a_workload_that_people_edit_do_not_tell_what_its_pods_are_for(edit: dict[str, str]) -> None:
    selected = {COMPONENT: "store", POOL: "dram", REVISION: "r1"}
    spec = {"selector": {"matchLabels": selected}, "template": {"metadata": {"labels": selected | {LANE: "A"}}}}
    meta = {"name": "qwen-store-dram", "namespace": "llm", "uid": "u", "labels": edit}
    found = observed_object(ObjectRef("StatefulSet", "qwen-store-dram"), {"metadata": meta, "spec": spec})
    assert found.labels == selected | {LANE: "A"}
    assert found.live["metadata"]["labels"] == edit


def test_who_is_being_deleted_needs_no_ledger() -> None:
    world = World()
    world.put("ConfigMap", "qwen-ports", data={"x": "?"})
    with pytest.raises(LedgerError):
        world.see()
    meta = replace(world.cluster.metadata, deleting=True)
    world.cluster = replace(world.cluster, metadata=meta)
    assert world.see().ledger == Ledger()
