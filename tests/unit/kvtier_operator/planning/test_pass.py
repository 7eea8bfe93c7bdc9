"""One pass as a whole: what a plan says about everything at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtier_operator.api import DeletionPolicy, Drain, Images, KVCacheCluster, PortRange
from kvtier_operator.observed import Component, DrainPhase, ObjectRef, Observed
from kvtier_operator.planning.actions import Apply, Emit, Plan, SaveLedger, SetFinalizer, StartDrain
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.plan import Builders, plan
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.progress import Progress
from kvtier_operator.testing.completeness import unfinished
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.sample_clusters import changed, sample_cluster, sample_pool, sample_role
from kvtier_operator.testing.sample_pods import engine_pods
from kvtier_operator.testing.sketch import SKETCH, sketch_status
from kvtier_operator.testing.world import World


def settled(cluster: KVCacheCluster) -> World:
    world = World(cluster)
    Fold(world, SKETCH).settle()
    assert unfinished(world, SKETCH.revision(world.cluster)) == []
    return world


def pass_over(world: World, observed: Observed | None = None) -> tuple[Plan, Progress]:
    told: list[Progress] = []

    def status(cluster: KVCacheCluster, around: Observed, progress: Progress) -> Mapping[str, object]:
        told.append(progress)
        return sketch_status(cluster, around, progress)

    builders = Builders(SKETCH.revision, SKETCH.children, status)
    return plan(world.cluster, observed or world.observe(), builders), told[-1]


def applied(made: Plan) -> list[str]:
    return [str(action.ref) for action in made.actions if isinstance(action, Apply)]


def test_the_first_pass_makes_the_foundation_and_etcd_and_waits_for_its_quorum() -> None:
    made, progress = pass_over(World(sample_cluster()))
    assert isinstance(made.actions[0], SaveLedger)
    sets = [name for name in applied(made) if name.startswith("StatefulSet")]
    assert sets == ["StatefulSet/kv-etcd"]
    assert progress.stage is Stage.COORDINATION
    assert progress.waiting_for == ("etcd: 0 of 3 members are ready, 2 are needed",)
    assert made.requeue_after_s == 5


def test_a_settled_cluster_has_nothing_to_do_and_needs_no_look() -> None:
    made, progress = pass_over(settled(sample_cluster()))
    assert (made.actions, made.requeue_after_s) == ((), 0)
    assert (progress.stage, progress.waiting_for) == (None, ())


def test_a_cluster_without_the_store_needs_neither_masters_nor_etcd() -> None:
    cluster = sample_cluster(roles=[sample_role(store=False)], pools=[])
    made, _ = pass_over(World(cluster))
    assert [name for name in applied(made) if name.startswith("StatefulSet")] == ["StatefulSet/kv-engine-v1-e-alone"]


def test_a_paused_cluster_is_only_told_about() -> None:
    world = World(replace(sample_cluster(), paused=True))
    made, progress = pass_over(world)
    assert (made.actions, made.requeue_after_s) == ((), 0)
    assert made.status
    assert progress.waiting_for


def test_the_finalizer_comes_before_the_first_child() -> None:
    made, _ = pass_over(World(sample_cluster(deletion=DeletionPolicy.DRAIN)))
    assert made.actions[0] == SetFinalizer(present=True)


def test_a_range_too_small_is_told_before_any_pod() -> None:
    tight = sample_cluster()
    tight = replace(tight, transport=replace(tight.transport, ports=PortRange(20000, 20)))
    made, progress = pass_over(World(tight))
    assert [action for action in made.actions if not isinstance(action, Emit)] == []
    assert [action.reason for action in made.actions if isinstance(action, Emit)] == ["PortRangeExhausted"]
    assert progress.exhausted
    assert progress.missing_ports > 0


def test_a_port_that_another_cluster_has_is_told_with_its_holder() -> None:
    described = sample_cluster()
    world = World(replace(described, transport=replace(described.transport, host_network=True)))
    world.ledger = Ledger({BlockKey("other.kv.uid", "api/engine", "", -1): Entry(PortBlock(9000, 9001))})
    made, progress = pass_over(world)
    told = [action for action in made.actions if isinstance(action, Emit)]
    assert [one.reason for one in told] == ["PortTaken"]
    assert "which api/engine//-1 of other.kv.uid has" in told[0].message
    assert progress.taken_ports
    assert applied(made) == []


def test_what_runs_is_kept_right_when_more_does_not_fit() -> None:
    world = settled(sample_cluster(pools=[sample_pool("dram", 1)]))
    few = replace(world.cluster.transport, ports=PortRange(20000, 60))
    world.cluster = changed(world.cluster, transport=few, pools=(sample_pool("dram", 9),))
    world.remove(ObjectRef("ServiceAccount", "kv"))
    world.objects[ObjectRef("StatefulSet", "kv-master")].live["spec"]["replicas"] = 2
    made, progress = pass_over(world)
    assert progress.exhausted
    assert "StatefulSet/kv-store-dram" not in applied(made)
    world.cluster = changed(world.cluster, pools=(sample_pool("dram", 1),))
    Fold(world, SKETCH).settle()
    assert unfinished(world, SKETCH.revision(world.cluster)) == []


def test_ports_of_the_whole_new_revision_are_there_before_its_first_pod() -> None:
    world = settled(sample_cluster(roles=[sample_role("engine", 3)]))
    world.cluster = changed(world.cluster, images=Images(engine="v2"))
    made, _ = pass_over(world)
    saved = next(action.ledger for action in made.actions if isinstance(action, SaveLedger))
    assert sum(key.lane == "B" for key in saved.entries) == 3
    slots = next(action for action in made.actions if isinstance(action, Apply) and action.ref.kind == "ConfigMap")
    assert len(slots.manifest["data"]) == 3


def test_a_drain_names_the_segment_by_host_and_label_port() -> None:
    world = settled(sample_cluster(pools=[sample_pool("dram", 2)]))
    world.cluster = changed(world.cluster, pools=(sample_pool("dram", 1),))
    made, progress = pass_over(world)
    started = next(action for action in made.actions if isinstance(action, StartDrain))
    entry = next(entry for key, entry in world.ledger.entries.items() if (key.group, key.slot) == ("store-dram", 1))
    assert started.segment == f"kv-store-dram-1.kv-store-dram.default.svc:{entry.block.start}"
    assert progress.draining == ("kv-store-dram-1",)
    assert made.requeue_after_s == 2


def test_a_lost_leader_takes_no_engine_away() -> None:
    world = settled(sample_cluster())
    world.cluster = changed(world.cluster, images=Images(engine="v2", mooncake="v2"))
    made, progress = pass_over(world, replace(world.observe(), masters={}, segments=frozenset()))
    assert [name for name in applied(made) if "engine" in name] == []
    assert progress.waiting_for[0].startswith("masters: 3 of 3 are ready, none of them leads")
    assert made.requeue_after_s == 1


def test_a_wait_of_a_minute_is_told_once_and_then_only_looked_at_rarely() -> None:
    world = World(sample_cluster(roles=[sample_role(store=False)], pools=[]))
    Fold(world, SKETCH).settle()
    stuck = engine_pods(1, "v1-e", ready=False, ip="", waiting="Unschedulable: no GPU")[0]

    def after(seconds: float) -> tuple[list[str], float]:
        made, _ = pass_over(world, replace(world.observe(), pods=(replace(stuck, waiting_s=seconds),)))
        return [action.message for action in made.actions if isinstance(action, Emit)], made.requeue_after_s

    assert after(10) == ([], 5)
    assert after(70) == (["kv-engine-v1-e-0 is not ready (Unschedulable: no GPU) for 60 s"], 60)
    assert after(170) == ([], 60)


def test_a_blocked_drain_is_looked_at_rarely() -> None:
    drain = Drain(timeout_ms=0)
    world = settled(sample_cluster(pools=[sample_pool("dram", 2, drain)]))
    world.cluster = changed(world.cluster, pools=(sample_pool("dram", 1, drain),))
    Fold(world, SKETCH).step()
    world.drains["kv-store-dram-1"].phase = DrainPhase.RUNNING
    made, progress = pass_over(world)
    assert list(progress.blocked_drains) == ["kv-store-dram-1"]
    assert made.requeue_after_s == 60


def test_a_deletion_says_who_is_waited_for() -> None:
    world = settled(sample_cluster(deletion=DeletionPolicy.DRAIN))
    world.delete_cluster()
    Fold(world, SKETCH).step()
    made, progress = pass_over(world)
    assert progress.deleting == Component.ENGINE
    assert progress.waiting_for[0].startswith("engine: kv-engine-v1-e-0 is terminating")
    assert made.requeue_after_s == 5
