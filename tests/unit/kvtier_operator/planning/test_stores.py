from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from kvtier_operator.api import Drain, DrainMode, DrainTimeout
from kvtier_operator.observed import Component, DrainPhase, DrainState, Observed, ObservedPod
from kvtier_operator.planning.actions import Action, CancelDrain, DeletePod, Emit, Scale, StartDrain
from kvtier_operator.planning.stores import StoresPlan, plan_stores
from kvtier_operator.testing.sample_clusters import sample_cluster, sample_pool
from kvtier_operator.testing.sample_pods import elected, master_pods, seen, store_pods, workload

PAUSE = Drain(timeout_ms=100_000)
FORCE = Drain(timeout_ms=100_000, on_timeout=DrainTimeout.FORCE)


def observed(pods: Sequence[ObservedPod], sizes: dict[str, int] | None = None, **more: Any) -> Observed:
    more.setdefault("masters", elected(3))
    more.setdefault("segments", frozenset(pod.name for pod in pods if pod.ready))
    sets = [workload(Component.STORE, size, pool) for pool, size in (sizes or {"dram": 3}).items()]
    return seen(sets, [*master_pods(3), *pods], **more)


def plan(
    pods: Sequence[ObservedPod], *, wanted: int = 3, drain: Drain = PAUSE, frozen: str = "", **more: Any
) -> StoresPlan:
    cluster = sample_cluster(pools=[sample_pool("dram", wanted, drain)])
    return plan_stores(cluster, observed(pods, **more), frozen, lambda pool, slot: f"{pool}-{slot}:1")


def drained(pod: str, phase: DrainPhase, running_s: float = 10.0) -> dict[str, DrainState]:
    return {pod: DrainState(pod, phase, running_s, job="7", detail="3 of 5 moved")}


def orders(made: StoresPlan) -> list[Action]:
    """Everything but events."""
    return [action for action in made.actions if not isinstance(action, Emit)]


def test_a_node_is_drained_before_its_pool_shrinks() -> None:
    made = plan(store_pods(3), wanted=2)
    assert made.replicas == {"dram": 3}
    assert orders(made) == [StartDrain("kv-store-dram-2", "uid-store-dram-2", "dram-2:1")]
    running = plan(store_pods(3), wanted=2, drains=drained("kv-store-dram-2", DrainPhase.RUNNING))
    assert (running.replicas, orders(running), running.draining) == ({"dram": 3}, [], ("kv-store-dram-2",))
    done = plan(store_pods(3), wanted=2, drains=drained("kv-store-dram-2", DrainPhase.DONE))
    assert (done.replicas, orders(done)) == ({"dram": 2}, [])


def test_a_pool_shrinks_by_one_node_at_a_time() -> None:
    done = plan(store_pods(3), wanted=0, drains=drained("kv-store-dram-2", DrainPhase.DONE))
    assert done.replicas == {"dram": 2}
    leaving = [*store_pods(2), *store_pods(3, deleting=True)[2:]]
    made = plan(leaving, wanted=0, sizes={"dram": 2})
    assert (made.replicas, orders(made)) == ({"dram": 2}, [])
    assert made.waiting == "store: kv-store-dram-2 is leaving"


def test_outdated_nodes_are_drained_and_replaced_one_by_one() -> None:
    pods = store_pods(3, up_to_date=False)
    made = plan(pods)
    assert [action.pod for action in orders(made) if isinstance(action, StartDrain)] == ["kv-store-dram-2"]
    done = plan(pods, drains=drained("kv-store-dram-2", DrainPhase.DONE))
    assert [action.name for action in orders(done) if isinstance(action, DeletePod)] == ["kv-store-dram-2"]
    starting = [*pods[:2], replace(pods[2], up_to_date=True, ready=False, waiting="starting")]
    assert orders(plan(starting)) == []
    assert orders(plan(pods[:2])) == []


def test_nodes_of_all_pools_leave_one_at_a_time() -> None:
    cluster = sample_cluster(pools=[sample_pool("a", 1), sample_pool("b", 1)])
    pods = [*store_pods(2, "a"), *store_pods(2, "b")]
    made = plan_stores(cluster, observed(pods, {"a": 2, "b": 2}), "", lambda pool, slot: f"{pool}-{slot}")
    assert len(orders(made)) == 1
    busy = observed(pods, {"a": 2, "b": 2}, drains=drained("kv-store-b-1", DrainPhase.RUNNING))
    assert orders(plan_stores(cluster, busy, "", lambda pool, slot: f"{pool}-{slot}")) == []


@pytest.mark.parametrize("phase", [DrainPhase.UNSUPPORTED, DrainPhase.DONE])
def test_where_the_master_has_no_drain_jobs_the_node_unmounts_and_an_event_says_so(phase: DrainPhase) -> None:
    made = plan(store_pods(3), wanted=2, drains=drained("kv-store-dram-2", phase))
    assert made.replicas == {"dram": 2}
    reasons = [action.reason for action in made.actions if isinstance(action, Emit)]
    assert reasons == ["CapabilityMissing" if phase is DrainPhase.UNSUPPORTED else "DrainCompleted"]


def test_discard_needs_no_drain() -> None:
    assert plan(store_pods(3), wanted=2, drain=Drain(DrainMode.DISCARD)).replicas == {"dram": 2}


def test_the_last_node_has_nobody_to_give_its_objects_to() -> None:
    assert plan(store_pods(1), wanted=0, sizes={"dram": 1}).replicas == {"dram": 0}


def test_a_drain_that_takes_too_long_waits_for_the_user_unless_force_was_chosen() -> None:
    late = drained("kv-store-dram-2", DrainPhase.RUNNING, 100.0)
    paused = plan(store_pods(3), wanted=2, drains=late)
    assert (paused.replicas, orders(paused)) == ({"dram": 3}, [])
    assert "takes longer than 100 s: 3 of 5 moved" in paused.blocked["kv-store-dram-2"]
    assert [action.reason for action in paused.actions if isinstance(action, Emit)] == ["DrainBlocked"]
    assert plan(store_pods(3), wanted=2, drain=FORCE, drains=late).replicas == {"dram": 2}


def test_a_blocked_drain_is_told_once() -> None:
    late = drained("kv-store-dram-2", DrainPhase.RUNNING, 100.0)
    status = {"conditions": [{"type": "DrainBlocked", "status": "True"}]}
    assert plan(store_pods(3), wanted=2, drains=late, status=status).actions == ()


def test_a_failed_drain_deletes_nothing_and_is_tried_again() -> None:
    """Killing where the careful way fails would lose the very objects it was for."""
    failed = plan(store_pods(3), wanted=2, drains=drained("kv-store-dram-2", DrainPhase.FAILED))
    assert (failed.replicas, orders(failed)) == ({"dram": 3}, [])
    assert "kv-store-dram-2" in failed.blocked
    later = plan(store_pods(3), wanted=2, drains=drained("kv-store-dram-2", DrainPhase.FAILED, 60.0))
    assert orders(later) == [CancelDrain("kv-store-dram-2", "uid-store-dram-2", "7")]
    forced = plan(store_pods(3), wanted=2, drain=FORCE, drains=drained("kv-store-dram-2", DrainPhase.FAILED))
    assert (forced.replicas, orders(forced)) == ({"dram": 3}, [])


def test_a_drain_ends_when_the_scale_in_is_taken_back() -> None:
    made = plan(store_pods(3), wanted=3, drains=drained("kv-store-dram-2", DrainPhase.RUNNING))
    assert orders(made) == [CancelDrain("kv-store-dram-2", "uid-store-dram-2", "7")]
    assert made.replicas == {"dram": 3}


def test_a_node_whose_objects_have_all_moved_starts_anew_though_it_may_stay() -> None:
    """Its segment takes no objects any more, and no master can change that."""
    made = plan(store_pods(3), drains=drained("kv-store-dram-2", DrainPhase.DONE))
    assert [action.name for action in orders(made) if isinstance(action, DeletePod)] == ["kv-store-dram-2"]
    assert len(orders(made)) == 1
    others = [*store_pods(1), *store_pods(3, ready=False, waiting="starting")[1:2], *store_pods(3)[2:]]
    assert orders(plan(others, drains=drained("kv-store-dram-2", DrainPhase.DONE))) == []


def test_a_drain_that_cannot_be_ended_yet_goes_on_visibly() -> None:
    made = plan(store_pods(3), drains=drained("kv-store-dram-2", DrainPhase.RUNNING))
    assert [type(action) for action in orders(made)] == [CancelDrain]
    assert made.draining == ("kv-store-dram-2",)


def test_a_drain_is_not_ended_while_nobody_leads_who_could_end_it() -> None:
    drains = drained("kv-store-dram-2", DrainPhase.RUNNING)
    assert orders(plan(store_pods(3), wanted=3, drains=drains, masters={})) == []


def test_without_a_leader_no_node_leaves() -> None:
    made = plan(store_pods(3), wanted=2, masters={}, segments=frozenset())
    assert (made.replicas, orders(made)) == ({"dram": 3}, [])
    assert made.waiting == "store: no master leads, so kv-store-dram-2 cannot be drained"


def test_a_node_that_the_leader_does_not_list_yet_is_not_taken_for_empty() -> None:
    made = plan(store_pods(3), wanted=2, segments=frozenset())
    assert (made.replicas, orders(made)) == ({"dram": 3}, [])
    assert "does not list the segment of kv-store-dram-2" in made.waiting


def test_scale_in_stands_still_while_etcd_has_no_quorum() -> None:
    made = plan(store_pods(3), wanted=2, frozen="etcd: 1 of 3 members are ready")
    assert (made.replicas, orders(made), made.waiting) == ({"dram": 3}, [], "etcd: 1 of 3 members are ready")


def test_a_broken_node_has_nothing_to_move() -> None:
    pods = [*store_pods(2), *store_pods(3, failure="CrashLoopBackOff")[2:]]
    assert plan(pods, wanted=2).replicas == {"dram": 2}
    outdated = [*store_pods(2), *store_pods(3, failure="CrashLoopBackOff", up_to_date=False)[2:]]
    assert [action.name for action in orders(plan(outdated)) if isinstance(action, DeletePod)] == ["kv-store-dram-2"]


def test_a_roll_stops_at_a_new_node_that_fails_but_a_shrink_does_not() -> None:
    old = store_pods(3, up_to_date=False)
    failed = store_pods(3, failure="CrashLoopBackOff")[0]
    assert orders(plan([failed, *old[1:]])) == []
    assert orders(plan([failed, *store_pods(3)[1:]], wanted=2)) == [
        StartDrain("kv-store-dram-2", "uid-store-dram-2", "dram-2:1")
    ]


def test_a_pool_that_the_spec_dropped_is_emptied_by_scaling() -> None:
    cluster = sample_cluster(pools=[sample_pool("a", 1)])
    pods = [*store_pods(1, "a"), *store_pods(1, "gone")]
    around = observed(pods, {"a": 1, "gone": 1}, drains=drained("kv-store-gone-0", DrainPhase.DONE))
    made = plan_stores(cluster, around, "", lambda pool, slot: f"{pool}-{slot}")
    assert made.replicas == {"a": 1}
    assert [(action.ref.name, action.replicas) for action in orders(made) if isinstance(action, Scale)] == [
        ("kv-store-gone", 0)
    ]


def test_a_pool_grows_at_once() -> None:
    made = plan(store_pods(3), wanted=5)
    assert (made.replicas, made.actions) == ({"dram": 5}, ())
