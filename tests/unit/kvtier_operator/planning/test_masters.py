from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import Durability
from kvtier_operator.observed import Component, MasterRole, MasterState, Observed, ObservedPod
from kvtier_operator.planning.actions import DeletePod, Emit, LabelPod
from kvtier_operator.planning.masters import MastersPlan, leading_master, plan_masters
from kvtier_operator.testing.sample_clusters import sample_cluster
from kvtier_operator.testing.sample_pods import elected, master_pods, seen, workload

CLUSTER = sample_cluster(masters=3)


def observed(pods: Sequence[ObservedPod], *, replicas: int = 3, **more: Any) -> Observed:
    more.setdefault("masters", elected(3))
    more.setdefault("status", {"leader": {"pod": "kv-master-0"}})
    return seen([workload(Component.MASTER, replicas)], pods, **more)


def outdated(**changes: Any) -> list[ObservedPod]:
    """Three masters with an old template; the first one leads and bears the label."""
    first, *rest = master_pods(3, up_to_date=False, **changes)
    return [replace(first, leader=True), *rest]


def deleted(plan: MastersPlan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, DeletePod)]


def test_standbys_are_replaced_first_from_the_highest_slot() -> None:
    assert deleted(plan_masters(CLUSTER, observed(outdated()), "")) == ["kv-master-2"]


def test_the_leader_goes_last_behind_standbys_that_have_caught_up() -> None:
    first, second, third = outdated()
    pods = [first, replace(second, up_to_date=True), replace(third, up_to_date=True)]
    assert deleted(plan_masters(CLUSTER, observed(pods), "")) == ["kv-master-0"]
    behind = observed(pods, masters=elected(3, caught_up=False))
    plan = plan_masters(CLUSTER, behind, "")
    assert deleted(plan) == []
    assert plan.waiting == "masters: kv-master-1 has not caught up with kv-master-0"


def test_without_an_oplog_nobody_has_to_catch_up() -> None:
    cluster = replace(CLUSTER, master=replace(CLUSTER.master, durability=Durability.NONE))
    behind = observed(outdated(), masters=elected(3, caught_up=False))
    assert deleted(plan_masters(cluster, behind, "")) == ["kv-master-2"]


def test_no_second_master_goes_while_one_is_down() -> None:
    first, second, third = outdated()
    for down in (replace(second, ready=False, waiting="starting"), replace(second, ready=False, deleting=True)):
        plan = plan_masters(CLUSTER, observed([first, down, third]), "")
        assert deleted(plan) == []
        assert "kv-master-1" in plan.waiting
    plan = plan_masters(CLUSTER, observed([first, third]), "")
    assert (deleted(plan), plan.waiting) == ([], "masters: 2 of 3 exist")


def test_a_broken_master_with_an_old_template_is_always_replaced() -> None:
    """It may be the one that needs the fix."""
    first, second, third = outdated()
    broken = replace(second, ready=False, failure="CrashLoopBackOff")
    assert deleted(plan_masters(CLUSTER, observed([first, broken, third]), "")) == ["kv-master-1"]
    never_ran = replace(second, ready=False, ip="", waiting="Unschedulable")
    assert deleted(plan_masters(CLUSTER, observed([first, never_ran, third]), "")) == ["kv-master-1"]


def test_the_roll_stands_still_while_etcd_has_no_quorum() -> None:
    plan = plan_masters(CLUSTER, observed(outdated()), "etcd: 1 of 3 members are ready")
    assert (deleted(plan), plan.waiting) == ([], "etcd: 1 of 3 members are ready")


def test_nobody_is_replaced_during_an_election_but_after_a_minute_of_it() -> None:
    """Masters that cannot elect need the new template."""

    def leaderless(since: str) -> Observed:
        condition = {"type": "MasterLeaderElected", "status": "False", "lastTransitionTime": since}
        return observed(outdated(), masters={}, status={"conditions": [condition]}, now=1_000_000_100.0)

    assert deleted(plan_masters(CLUSTER, leaderless("2001-09-09T01:48:00Z"), "")) == []
    assert deleted(plan_masters(CLUSTER, leaderless("2001-09-09T01:47:00Z"), "")) == ["kv-master-2"]


def test_the_only_master_is_simply_replaced() -> None:
    cluster = sample_cluster(masters=1, etcd=0)
    pods = master_pods(1, up_to_date=False)
    assert deleted(plan_masters(cluster, observed(pods, replicas=1, masters={}), "")) == ["kv-master-0"]


def test_the_label_leaves_the_former_leader_before_the_next_one_gets_it() -> None:
    first, *rest = master_pods(3)
    plan = plan_masters(CLUSTER, observed([replace(first, leader=True), *rest], masters=elected(3, leader=2)), "")
    moves = [
        (action.name, action.labels[labels.MASTER_ROLE]) for action in plan.actions if isinstance(action, LabelPod)
    ]
    assert moves == [("kv-master-0", None), ("kv-master-2", "leader")]
    assert [action.reason for action in plan.actions if isinstance(action, Emit)] == ["LeaderElected"]


def test_a_leader_that_is_silent_for_a_moment_keeps_its_label() -> None:
    first, *rest = master_pods(3)
    silent = observed([replace(first, leader=True), *rest], masters={})
    actions = plan_masters(CLUSTER, silent, "").actions
    assert [type(action) for action in actions] == [Emit]
    assert isinstance(actions[0], Emit)
    assert (actions[0].reason, actions[0].warning) == ("LeaderLost", True)


def test_nothing_is_done_or_said_when_all_is_well() -> None:
    first, *rest = master_pods(3)
    assert plan_masters(CLUSTER, observed([replace(first, leader=True), *rest]), "") == MastersPlan(3)


def test_of_two_that_claim_to_lead_the_later_election_counts() -> None:
    states = elected(3) | {"kv-master-1": MasterState("kv-master-1", MasterRole.LEADER, serving=True, view_version=2)}
    leader = leading_master(CLUSTER, observed(master_pods(3), masters=states))
    assert leader is not None
    assert leader.name == "kv-master-1"


def test_masters_leave_one_by_one_and_the_leader_only_behind_a_successor() -> None:
    states = elected(5, leader=4)
    pods = master_pods(5)
    plan = plan_masters(CLUSTER, observed(pods, replicas=5, masters=states), "")
    assert plan.replicas == 4
    behind = elected(5, leader=4, caught_up=False)
    plan = plan_masters(CLUSTER, observed(pods, replicas=5, masters=behind), "")
    assert (plan.replicas, plan.waiting) == (
        5,
        "masters: no standby has caught up with kv-master-4, which has to leave",
    )
    leaving = [*pods[:4], replace(pods[4], deleting=True, ready=False)]
    assert plan_masters(CLUSTER, observed(leaving, replicas=4, masters=elected(4)), "").replicas == 4


def test_a_broken_master_leaves_at_once_when_fewer_are_wanted() -> None:
    pods = [*master_pods(3), *master_pods(5, failure="CrashLoopBackOff")[3:]]
    assert plan_masters(CLUSTER, observed(pods, replicas=5, masters=elected(3)), "").replicas == 4


def test_more_masters_come_at_once() -> None:
    assert plan_masters(sample_cluster(masters=5), observed(master_pods(3)), "").replicas == 5
