from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtier_operator.api import KVCacheCluster, Rollout, RolloutPolicy
from kvtier_operator.observed import Component, ObjectRef, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.engines import EnginesPlan, plan_engines
from kvtier_operator.planning.ledger import Entry, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.wants import block_key, owner_of
from kvtier_operator.testing.sample_clusters import approved, sample_cluster, sample_role, split_roles
from kvtier_operator.testing.sample_pods import engine_pods, seen, workload

CLUSTER = sample_cluster(roles=[sample_role("engine", 3)])


def sets(replicas: int, revision: str, lane: str, role: str = "engine") -> ObservedObject:
    return workload(Component.ENGINE, replicas, role, revision, lane)


def plan(
    objects: Sequence[ObservedObject],
    pods: Sequence[ObservedPod],
    *,
    cluster: KVCacheCluster = CLUSTER,
    target: str = "new",
    hold: str = "",
    **more: Any,
) -> EnginesPlan:
    more.setdefault("status", {"revisions": {"current": "old"}})
    return plan_engines(cluster, seen(objects, pods, **more), target, hold)


def scaled(made: EnginesPlan) -> dict[str, int]:
    return {action.ref.name: action.replicas for action in made.scales}


def deleted(made: EnginesPlan) -> list[str]:
    return [action.ref.name for action in made.deletes]


def with_ports(cluster: KVCacheCluster, lanes: dict[str, int]) -> Ledger:
    keys = [
        block_key(owner_of(cluster), Component.ENGINE, "engine", lane, slot)
        for lane, size in lanes.items()
        for slot in range(size)
    ]
    return Ledger({key: Entry(PortBlock(20000 + index, 20001 + index)) for index, key in enumerate(keys)})


def test_the_first_creation_is_no_rollout() -> None:
    made = plan([], [], status={})
    assert (made.revision.lane, made.replicas, made.rendered) == ("A", {"engine": 3}, True)
    assert (made.scales, made.deletes, made.events, made.waiting) == ((), (), (), "")


def test_another_size_of_the_same_revision_just_applies() -> None:
    made = plan([sets(1, "new", "B")], engine_pods(1, "new"), status={"revisions": {"current": "new"}})
    assert (made.revision.lane, made.replicas, made.events) == ("B", {"engine": 3}, ())


def test_a_new_revision_gets_the_other_lane_and_its_first_unit_in_place_of_an_old_one() -> None:
    made = plan([sets(3, "old", "A")], engine_pods(3, "old"))
    assert (made.revision.lane, made.replicas) == ("B", {"engine": 1})
    assert scaled(made) == {"kv-engine-old": 2}
    assert [event.reason for event in made.events] == ["RolloutStarted"]
    assert made.progress.running


def test_the_next_unit_waits_until_the_former_is_ready() -> None:
    objects = [sets(2, "old", "A"), sets(1, "new", "B")]
    starting = engine_pods(1, "new", ready=False, waiting="starting")
    made = plan(objects, [*engine_pods(2, "old"), *starting])
    assert (made.replicas, scaled(made)) == ({"engine": 1}, {})
    made = plan(objects, [*engine_pods(2, "old"), *engine_pods(1, "new")])
    assert (made.replicas, scaled(made)) == ({"engine": 2}, {"kv-engine-old": 1})


def test_with_surge_the_new_unit_comes_first() -> None:
    cluster = replace(CLUSTER, rollout=Rollout(max_surge=1))
    made = plan([sets(3, "old", "A")], engine_pods(3, "old"), cluster=cluster)
    assert (made.replicas, scaled(made)) == ({"engine": 1}, {})


def test_prefill_and_decode_change_in_one_plan() -> None:
    cluster = sample_cluster(roles=split_roles(2, 4))
    objects = [sets(2, "old", "A", "prefill"), sets(4, "old", "A", "decode")]
    pods = [*engine_pods(2, "old", "prefill"), *engine_pods(4, "old", "decode")]
    made = plan(objects, pods, cluster=cluster)
    assert made.replicas == {"prefill": 1, "decode": 2}
    assert scaled(made) == {"kv-prefill-old": 1, "kv-decode-old": 2}
    half = [*objects, sets(1, "new", "B", "prefill"), sets(2, "new", "B", "decode")]
    only_prefill = [*pods, *engine_pods(1, "new", "prefill")]
    assert plan(half, only_prefill, cluster=cluster).replicas == {"prefill": 1, "decode": 2}


def test_the_rollout_stops_at_the_first_failed_pod_of_the_new_revision() -> None:
    objects = [sets(2, "old", "A"), sets(1, "new", "B")]
    failed = engine_pods(1, "new", failure="CrashLoopBackOff")
    made = plan(objects, [*engine_pods(2, "old"), *failed])
    assert (made.replicas, scaled(made)) == ({"engine": 1}, {})
    assert made.progress.halted == "kv-engine-new-0 of revision new has failed (CrashLoopBackOff)"
    assert [event.reason for event in made.events] == ["RolloutHalted"]


def test_a_halted_rollout_goes_on_with_the_next_spec_only() -> None:
    objects = [sets(2, "old", "A"), sets(1, "new", "B")]
    pods = [*engine_pods(2, "old"), *engine_pods(1, "new")]
    halted = [{"type": "RolloutHalted", "status": "True", "observedGeneration": 1}]
    status = {"conditions": halted, "revisions": {"current": "old"}}
    made = plan(objects, pods, status=status)
    assert (made.replicas, scaled(made), made.events) == ({"engine": 1}, {}, ())
    assert made.progress.halted
    edited = replace(CLUSTER, metadata=replace(CLUSTER.metadata, generation=2))
    assert plan(objects, pods, cluster=edited, status=status).replicas == {"engine": 2}


def test_a_broken_old_pod_does_not_hold_up_the_fix() -> None:
    made = plan([sets(3, "old", "A")], engine_pods(3, "old", failure="CrashLoopBackOff"))
    assert (made.replicas, scaled(made)) == ({"engine": 1}, {"kv-engine-old": 2})


def test_a_supervised_rollout_waits_for_the_approval_of_this_revision() -> None:
    cluster = replace(CLUSTER, rollout=Rollout(RolloutPolicy.SUPERVISED))
    old = [sets(3, "old", "A")]
    for unapproved in (cluster, approved(cluster, "another")):
        made = plan(old, engine_pods(3, "old"), cluster=unapproved)
        assert (made.rendered, made.replicas, scaled(made)) == (False, {"engine": 0}, {})
        assert made.progress.approval_wanted
    made = plan(old, engine_pods(3, "old"), cluster=approved(cluster, "new"))
    assert (made.rendered, made.replicas) == (True, {"engine": 1})


def test_a_rollout_takes_no_step_while_something_before_it_is_not_ready() -> None:
    made = plan([sets(3, "old", "A")], engine_pods(3, "old"), hold="masters: none leads")
    assert (made.rendered, scaled(made), made.waiting) == (False, {}, "masters: none leads")
    begun = plan([sets(2, "old", "A"), sets(1, "new", "B")], engine_pods(2, "old"), hold="masters: none leads")
    assert (begun.rendered, begun.replicas, scaled(begun)) == (True, {"engine": 1}, {})


def test_fewer_wanted_pods_leave_at_once_also_while_the_rollout_stands() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 1),))
    made = plan([sets(3, "old", "A")], engine_pods(3, "old"), cluster=cluster, hold="masters: none leads")
    assert scaled(made) == {"kv-engine-old": 1}


def test_to_roll_back_is_to_make_the_old_revision_the_target() -> None:
    objects = [sets(2, "old", "A"), sets(1, "new", "B")]
    pods = [*engine_pods(2, "old"), *engine_pods(1, "new", failure="CrashLoopBackOff")]
    made = plan(objects, pods, target="old")
    assert (made.revision.lane, made.replicas, scaled(made)) == ("A", {"engine": 3}, {"kv-engine-new": 0})


def test_one_former_revision_stays_at_zero_and_older_ones_go() -> None:
    objects = [sets(0, "old", "A"), sets(3, "new", "B")]
    rolling = {"conditions": [{"type": "Progressing", "status": "True", "reason": "RollingOut"}]}
    made = plan(objects, engine_pods(3, "new"), status=rolling)
    assert (deleted(made), made.progress.previous) == ([], "old")
    assert [event.reason for event in made.events] == ["RolloutCompleted"]
    made = plan(objects, engine_pods(3, "new"), target="newest", status={"revisions": {"current": "new"}})
    assert (made.revision.lane, deleted(made)) == ("A", ["kv-engine-old"])


def test_of_two_idle_revisions_the_one_that_served_last_stays() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 0),))
    made = plan([sets(0, "old", "A"), sets(0, "older", "B")], [], cluster=cluster)
    assert (made.revision.lane, deleted(made), made.progress.previous) == ("B", ["kv-engine-older"], "old")


def test_history_stays_as_long_as_a_rollout_waits_for_approval() -> None:
    cluster = replace(CLUSTER, rollout=Rollout(RolloutPolicy.SUPERVISED))
    made = plan([sets(0, "older", "A"), sets(3, "old", "B")], engine_pods(3, "old"), cluster=cluster)
    assert (deleted(made), made.progress.previous) == ([], "older")


def test_everything_of_a_revision_goes_with_it() -> None:
    settings = replace(sets(0, "older", "A"), ref=ObjectRef("ConfigMap", "kv-engine-older"))
    made = plan([settings, sets(0, "older", "A"), sets(3, "old", "B")], engine_pods(3, "old"))
    assert sorted(str(action.ref) for action in made.deletes) == [
        "ConfigMap/kv-engine-older",
        "StatefulSet/kv-engine-older",
    ]


def test_a_third_revision_waits_until_the_broken_one_has_left_its_lane() -> None:
    objects = [sets(2, "old", "A"), sets(1, "broken", "B")]
    pods = [*engine_pods(2, "old"), *engine_pods(1, "broken", failure="CrashLoopBackOff")]
    made = plan(objects, pods, ledger=with_ports(CLUSTER, {"A": 3, "B": 3}))
    assert (made.rendered, scaled(made)) == (False, {"kv-engine-broken": 0})
    assert made.progress.abandoned == "broken"
    left = plan([objects[0], sets(0, "broken", "B")], engine_pods(2, "old"))
    assert (left.revision.lane, left.replicas, scaled(left), deleted(left)) == (
        "B",
        {"engine": 1},
        {},
        ["kv-engine-broken"],
    )


def test_of_two_revisions_left_behind_the_better_one_grows_in_place_of_the_other() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 6),))
    objects = [sets(3, "old", "A"), sets(3, "mid", "B")]
    pods = [*engine_pods(3, "old"), *engine_pods(2, "mid")]
    made = plan(objects, pods, cluster=cluster, ledger=with_ports(cluster, {"A": 6, "B": 6}))
    assert scaled(made) == {"kv-engine-mid": 2, "kv-engine-old": 4}


def test_while_fewer_run_than_are_wanted_nobody_has_to_make_room() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 4),))
    objects = [sets(2, "old", "A"), sets(1, "mid", "B")]
    ledger = with_ports(cluster, {"A": 3, "B": 3})
    made = plan(objects, [*engine_pods(2, "old"), *engine_pods(1, "mid")], cluster=cluster, ledger=ledger)
    assert scaled(made) == {"kv-engine-old": 3}
    grown = [sets(3, "old", "A"), objects[1]]
    made = plan(grown, [*engine_pods(3, "old"), *engine_pods(1, "mid")], cluster=cluster, ledger=ledger)
    assert scaled(made) == {"kv-engine-mid": 0}


def test_of_split_revisions_left_behind_the_one_that_serves_stays() -> None:
    cluster = sample_cluster(roles=split_roles(2, 2))
    whole = [sets(1, "old", "A", "prefill"), sets(1, "old", "A", "decode")]
    half = [sets(3, "half", "B", "prefill"), sets(0, "half", "B", "decode")]
    pods = [*engine_pods(1, "old", "prefill"), *engine_pods(1, "old", "decode"), *engine_pods(3, "half", "prefill")]
    made = plan([*whole, *half], pods, cluster=cluster)
    assert made.progress.abandoned == "half"
    assert scaled(made)["kv-prefill-half"] == 0


def test_a_split_revision_without_one_of_its_roles_never_grows() -> None:
    cluster = sample_cluster(roles=split_roles(3, 3))
    objects = [sets(2, "a", "A", "prefill"), sets(1, "b", "B", "prefill")]
    made = plan(objects, [*engine_pods(2, "a", "prefill"), *engine_pods(1, "b", "prefill")], cluster=cluster)
    assert scaled(made) == {"kv-prefill-b": 0}


def test_a_revision_left_behind_never_gets_more_pods_than_it_had_ports_for() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 6),))
    objects = [sets(3, "old", "A"), sets(3, "mid", "B")]
    pods = [*engine_pods(3, "old"), *engine_pods(2, "mid")]
    made = plan(objects, pods, cluster=cluster, ledger=with_ports(cluster, {"A": 3, "B": 3}))
    assert "kv-engine-old" not in scaled(made)


def test_pods_without_a_set_hold_their_revision_in_place() -> None:
    """Somebody deleted the set; its pods still use their lane's ports."""
    made = plan([], engine_pods(2, "old"), target="new")
    assert made.progress.running


def test_roles_at_zero_are_a_normal_state() -> None:
    cluster = replace(CLUSTER, roles=(sample_role("engine", 0),))
    made = plan([sets(0, "old", "A")], [], cluster=cluster)
    assert (made.revision.lane, made.replicas, made.waiting) == ("B", {"engine": 0}, "")


def test_observation_has_no_part_in_what_is_not_ours() -> None:
    foreign = replace(sets(3, "old", "A"), owner_uid="somebody")
    made = plan([foreign], [])
    assert (made.scales, made.deletes, made.replicas) == ((), (), {"engine": 3})


def test_an_empty_observation_is_enough() -> None:
    assert plan_engines(CLUSTER, Observed(), "new", "").rendered
