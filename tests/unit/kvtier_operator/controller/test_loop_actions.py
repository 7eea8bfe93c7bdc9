"""Each action of a plan as the controller carries it out: under which precondition, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from kvtier_operator.api import parse
from kvtier_operator.controller.apply import Scene
from kvtier_operator.controller.masters import AdminAddress, MastersView
from kvtier_operator.controller.observe import NO_DRAIN_JOBS
from kvtier_operator.errors import ApiConflict
from kvtier_operator.labels import DRAIN_JOB, FINALIZER, MANAGED_BY, MANAGER
from kvtier_operator.observed import DrainPhase, ObjectRef
from kvtier_operator.planning.actions import (
    CancelDrain,
    Delete,
    DeletePod,
    Emit,
    LabelPod,
    SaveLedger,
    Scale,
    SetFinalizer,
    StartDrain,
)
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.testing.controller_world import CLUSTER, ControllerWorld, store_pod, wanted
from kvtier_operator.testing.faulty_cluster import Fault

LEADER = AdminAddress("10.0.0.1", 9003)


def test_pods_are_labelled_and_deleted_under_their_uid() -> None:
    world = ControllerWorld()
    uid = world.api.put(store_pod("small-store-dram-0"))["metadata"]["uid"]
    world.do(LabelPod("small-store-dram-0", uid, {"kvtier.dev/master-role": "leader"}, "it leads"))
    assert world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["labels"]["kvtier.dev/master-role"]
    with pytest.raises(ApiConflict):
        world.do(LabelPod("small-store-dram-0", "another", {}, "it leads"))
    world.do(DeletePod("small-store-dram-0", "another", "roll"))
    assert ("Pod", "llm", "small-store-dram-0") in world.api.objects
    world.do(DeletePod("small-store-dram-0", uid, "roll"))
    assert ("Pod", "llm", "small-store-dram-0") not in world.api.objects
    world.do(DeletePod("small-store-dram-0", uid, "roll"))


def test_objects_are_scaled_and_deleted() -> None:
    world = ControllerWorld()
    body = {**wanted(), "kind": "StatefulSet", "metadata": {**wanted()["metadata"], "name": "old"}}
    uid = world.api.put(body)["metadata"]["uid"]
    world.do(Scale(ObjectRef("StatefulSet", "old"), uid, 0, "rollout"))
    assert world.api.objects["StatefulSet", "llm", "old"]["spec"]["replicas"] == 0
    world.do(Delete(ObjectRef("StatefulSet", "old"), uid, "history"))
    assert ("StatefulSet", "llm", "old") not in world.api.objects


def test_a_ledger_is_made_then_replaced_and_a_race_is_lost_safely() -> None:
    world = ControllerWorld()
    ledger = Ledger({BlockKey("llm.small.cluster-uid", "master", "", -1): Entry(PortBlock(20000, 20002))})
    world.do(SaveLedger(ledger))
    world.look()
    saved = world.seen[-1]
    assert saved.ledger.entries == ledger.entries
    world.do(SaveLedger(saved.ledger))
    with pytest.raises(ApiConflict):
        world.do(SaveLedger(saved.ledger))
    with pytest.raises(ApiConflict):
        world.do(SaveLedger(ledger))
    stored = world.api.objects["ConfigMap", "llm", "small-ports"]["metadata"]
    assert stored["ownerReferences"][0]["uid"] == "cluster-uid"


def test_a_ledger_without_its_labels_is_found_again() -> None:
    world = ControllerWorld()
    ledger = Ledger({BlockKey("llm.small.cluster-uid", "master", "", -1): Entry(PortBlock(20000, 20002))})
    world.do(SaveLedger(ledger))
    stored = world.api.objects["ConfigMap", "llm", "small-ports"]
    del stored["metadata"]["labels"]
    world.index.remove("llm", ObjectRef("ConfigMap", "small-ports"), stored["metadata"]["uid"])
    with pytest.raises(ApiConflict):
        world.do(SaveLedger(ledger))
    assert world.api.objects["ConfigMap", "llm", "small-ports"]["metadata"]["labels"][MANAGED_BY] == MANAGER
    world.look()
    assert world.seen[-1].ledger.entries == ledger.entries


def test_a_drain_is_started_at_the_leader_remembered_on_the_pod_and_ended() -> None:
    world = ControllerWorld()
    uid = world.api.put(store_pod("small-store-dram-0"))["metadata"]["uid"]
    world.masters.up, world.masters.leader, world.masters.mounted = {LEADER}, LEADER, ("dram-0:1",)
    view = MastersView(leader=LEADER, segments={"small-store-dram-0": "dram-0:1"})
    scene = Scene(parse(CLUSTER), view, world.time.now)
    start, cancel = StartDrain("small-store-dram-0", uid, "dram-0"), CancelDrain("small-store-dram-0", uid, "job-1")
    asyncio.run(world.executor.carry_out(start, scene))
    annotations = world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert annotations[DRAIN_JOB] == "job-1"
    world.look()
    drain = world.seen[-1].drains["small-store-dram-0"]
    assert (drain.job, drain.running_s) == ("job-1", 0.0)
    world.masters.moving = True
    asyncio.run(world.executor.carry_out(cancel, scene))
    annotations = world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert annotations[DRAIN_JOB] == "job-1", "what cannot be ended yet is not forgotten"
    world.masters.moving = False
    asyncio.run(world.executor.carry_out(cancel, scene))
    assert DRAIN_JOB not in world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert world.masters.progress["job-1"].phase is DrainPhase.FAILED
    world.masters.drains_known = False
    asyncio.run(world.executor.carry_out(start, scene))
    annotations = world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert annotations[DRAIN_JOB] == NO_DRAIN_JOBS


def test_the_finalizer_is_added_once_and_removed_without_those_of_others() -> None:
    world = ControllerWorld()
    body = world.api.put({**CLUSTER, "metadata": {**CLUSTER["metadata"], "finalizers": ["theirs"]}})
    world.learn("KVCacheCluster", body)
    world.look()
    world.do(SetFinalizer(present=True))
    stored = world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]
    assert world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]["finalizers"] == ["theirs", FINALIZER]
    writes = len(world.api.writes)
    world.do(SetFinalizer(present=True))
    assert len(world.api.writes) == writes
    world.do(SetFinalizer(present=False))
    stored = world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]
    assert stored["finalizers"] == ["theirs"]


def test_an_equal_event_is_written_again_only_after_five_minutes() -> None:
    world = ControllerWorld()
    world.look()
    for now in (0.0, 100.0, 299.0, 300.0):
        world.time.now = 1000.0 + now
        world.do(Emit("LeaderLost", "nobody leads", warning=True))
    events = [body for place, body in world.api.objects.items() if place[0] == "Event"]
    assert len(events) == 2
    assert events[0]["type"] == "Warning"
    assert events[0]["involvedObject"]["uid"] == "cluster-uid"


def test_a_state_that_lasts_is_told_once_also_by_the_next_process() -> None:
    world = ControllerWorld()
    world.look()
    waiting = Emit("WaitingForCapacity", "pod small-master-0 finds no node", warning=True)
    for now in (0.0, 300.0, 600.0):
        world.time.now = 1000.0 + now
        world.do(waiting)
    again = ControllerWorld(api=world.api)
    writes = len(world.api.writes)
    again.do(waiting)
    assert len([place for place in world.api.objects if place[0] == "Event"]) == 1
    assert ("create", next(name for kind, _, name in world.api.objects if kind == "Event")) in world.api.writes[:writes]


def test_an_event_that_cannot_be_written_does_not_fail_the_pass() -> None:
    world = ControllerWorld()
    world.look()
    world.faulty.faults = deque([Fault.BROKEN])
    world.do(Emit("LeaderLost", "nobody leads"))
