"""The passes of the controller: what one writes, whose objects it leaves alone, when the next one is made."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from kvtier_operator.controller.foreign import LOOK_AGAIN_S
from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.controller.leadership import OpenFence
from kvtier_operator.errors import ApiConflict, ApiUnavailable, NotLeader
from kvtier_operator.kinds import KINDS
from kvtier_operator.labels import MANAGED_BY, MANAGER
from kvtier_operator.observed import Manifest, ObjectRef
from kvtier_operator.planning.actions import Emit, LabelPod
from kvtier_operator.testing.controller_world import CLUSTER, KEY, SERVICE, ControllerWorld, store_pod, wanted
from kvtier_operator.testing.faulty_cluster import Fault
from kvtier_operator.testing.memory_cluster import MemoryCluster


async def turns() -> None:
    """Let every task do what it can."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_the_first_pass_applies_and_tells_the_second_writes_nothing() -> None:
    world = ControllerWorld()
    assert world.look()[0] == "changed"
    assert world.api.writes == [("apply", "small-api"), ("status", "small")]
    assert world.look()[0] == "unchanged"
    assert len(world.api.writes) == 2


def test_the_index_knows_of_our_own_writes_before_any_watch_does() -> None:
    world = ControllerWorld()
    world.look()
    assert world.index.find("llm", SERVICE) is not None
    world.look()
    assert SERVICE in world.seen[-1].objects


def test_a_pass_that_wrote_is_followed_by_another_and_ever_slower_if_that_goes_on() -> None:
    world = ControllerWorld()
    world.actions = [LabelPod("nobody", "u", {}, "always")]
    world.api.put(store_pod("nobody"))
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


def test_a_foreign_object_is_left_alone_seen_by_the_plan_and_looked_at_again_later() -> None:
    world = ControllerWorld()
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
    world = ControllerWorld()
    stripped = wanted()
    del stripped["metadata"]["labels"]
    world.api.put(stripped)
    world.look()
    assert world.api.objects["Service", "llm", "small-api"]["metadata"]["labels"][MANAGED_BY] == MANAGER
    assert world.metrics.registry.get_sample_value("kvtier_operator_drift_repaired_total", {"kind": "Service"}) == 1


def test_an_object_that_was_replaced_by_another_one_of_its_name_is_not_written_to() -> None:
    world = ControllerWorld()
    world.look()
    world.api.objects["Service", "llm", "small-api"]["metadata"]["uid"] = "another"
    world.port = 81
    with pytest.raises(ApiConflict):
        world.look()


def test_who_does_not_lead_writes_nothing() -> None:
    world = ControllerWorld()

    class Shut(OpenFence):
        def check(self) -> None:
            raise NotLeader("not ours")

    world.executor.fence = Shut()
    with pytest.raises(NotLeader):
        world.look()
    assert world.api.writes == []


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.BUSY, Fault.BROKEN, Fault.LOST_BEFORE, Fault.LOST_AFTER])
@pytest.mark.parametrize("cut", [0, 1])
def test_after_any_failed_write_the_next_passes_reach_the_same_end(fault: Fault, cut: int) -> None:
    world = ControllerWorld()
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
    world = ControllerWorld()
    world.look()
    world.index.remove("llm", ObjectRef("KVCacheCluster", "small"), "cluster-uid")
    assert world.look() == ("gone", 0.0)
    assert not next(iter(world.metrics.conditions.collect())).samples


def test_workers_take_what_is_due_and_come_back_for_the_resync() -> None:
    world = ControllerWorld()

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
    world = ControllerWorld()

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
    world = ControllerWorld()
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
    world = ControllerWorld()
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
