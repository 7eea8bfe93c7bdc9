"""Passes that cannot do what the spec asks for: what each says in the status, and what it lets go all the same."""

from __future__ import annotations

import pytest
from kvtier_operator.controller.loop import LEDGER_S
from kvtier_operator.controller.masters import MasterSilent
from kvtier_operator.errors import ApiDenied, ApiError, ApiInvalid, ApiUnavailable
from kvtier_operator.labels import FINALIZER
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.actions import SaveLedger
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.testing.controller_world import CLUSTER, ControllerWorld
from kvtier_operator.testing.memory_cluster import MemoryCluster

GOING = {**CLUSTER["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": [FINALIZER, "theirs"]}


def test_an_invalid_object_gets_all_violations_in_its_status_and_its_children_stay() -> None:
    world = ControllerWorld()
    world.look()
    bad = {**CLUSTER, "spec": {**CLUSTER["spec"], "nonsense": 1, "roles": []}}
    world.learn("KVCacheCluster", world.api.put(bad))
    assert world.look()[0] == "invalid"
    message = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]["message"]
    assert "spec.nonsense" in message
    assert "spec.roles" in message
    assert ("Service", "llm", "small-api") in world.api.objects


def test_a_damaged_port_ledger_is_told_in_the_status_and_nothing_is_written_but_that() -> None:
    world = ControllerWorld()
    meta = {"name": "small-ports", "namespace": "llm", "labels": {"kvtier.dev/cluster": "small"}}
    world.learn("ConfigMap", world.api.put({"kind": "ConfigMap", "metadata": meta, "data": {"x": "?"}}))
    outcome, again_s = world.look()
    assert (outcome, again_s) == ("invalid", LEDGER_S)
    assert world.api.writes == [("status", "small")]
    message = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]["message"]
    assert "is no JSON" in message


def test_what_the_server_never_accepts_is_said_in_status_and_event_and_not_retried_at_once() -> None:
    world = ControllerWorld()

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
    world = ControllerWorld()

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
    world = ControllerWorld(said=("Ready", "Progressing"))

    class Broken(MemoryCluster):
        async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
            raise error

    world.executor.api = Broken(world.api.objects)
    with pytest.raises(type(error)):
        world.look()
    ready, progressing = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"]
    assert progressing["message"] == f"m; {error}"
    assert ready["message"] == "m"


def test_an_invalid_object_that_is_to_go_is_let_go() -> None:
    world = ControllerWorld()
    bad = {**CLUSTER, "metadata": GOING, "spec": {**CLUSTER["spec"], "roles": []}}
    world.learn("KVCacheCluster", world.api.put(bad))
    world.look()
    assert world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]["finalizers"] == ["theirs"]
    assert world.look()[0] == "invalid"


def test_an_invalid_object_that_is_paused_stays() -> None:
    world = ControllerWorld()
    bad = {**CLUSTER, "metadata": GOING, "spec": {**CLUSTER["spec"], "roles": [], "paused": True}}
    world.learn("KVCacheCluster", world.api.put(bad))
    assert world.look()[0] == "invalid"
    assert FINALIZER in world.api.objects["KVCacheCluster", "llm", "small"]["metadata"]["finalizers"]


def test_a_damaged_ledger_keeps_nobody_from_going() -> None:
    world = ControllerWorld()
    meta = {"name": "small-ports", "namespace": "llm", "labels": {"kvtier.dev/cluster": "small"}}
    world.learn("ConfigMap", world.api.put({"kind": "ConfigMap", "metadata": meta, "data": {"x": "?"}}))
    world.learn("KVCacheCluster", world.api.put({**CLUSTER, "metadata": GOING}))
    world.look()
    assert world.seen[-1].ledger == Ledger()


def test_somebody_else_s_object_in_the_place_of_the_ledger_is_told_and_left_alone() -> None:
    world = ControllerWorld()
    theirs = {"kind": "ConfigMap", "metadata": {"name": "small-ports", "namespace": "llm"}, "data": {"a": "b"}}
    world.api.put(theirs)
    world.actions = [SaveLedger(Ledger())]
    assert world.look() == ("conflict", LEDGER_S)
    ready = world.api.objects["KVCacheCluster", "llm", "small"]["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "ApplyRefused")
    assert "llm/small-ports is not ours" in ready["message"]
    assert world.api.objects["ConfigMap", "llm", "small-ports"]["data"] == {"a": "b"}
