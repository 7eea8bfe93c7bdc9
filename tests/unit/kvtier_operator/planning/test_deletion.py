from __future__ import annotations

from dataclasses import replace

from kvtier_operator import labels
from kvtier_operator.api import DeletionPolicy, KVCacheCluster
from kvtier_operator.observed import Component
from kvtier_operator.planning.actions import Scale, SetFinalizer
from kvtier_operator.planning.deletion import Farewell, bid_farewell, finalizer_actions
from kvtier_operator.testing.sample_clusters import sample_cluster
from kvtier_operator.testing.sample_pods import engine_pods, seen, store_pods, workload


def cluster(policy: DeletionPolicy, *, held: bool, deleting: bool = True) -> KVCacheCluster:
    plain = sample_cluster(deletion=policy)
    finalizers = ("other", labels.FINALIZER) if held else ("other",)
    return replace(plain, metadata=replace(plain.metadata, finalizers=finalizers, deleting=deleting))


DRAINING = cluster(DeletionPolicy.DRAIN, held=True)
SETS = [workload(Component.ENGINE, 2, "engine", "r", "A"), workload(Component.STORE, 2, "dram")]


def scaled(made: Farewell) -> list[tuple[str, int]]:
    return [(action.ref.name, action.replicas) for action in made.actions if isinstance(action, Scale)]


def test_the_finalizer_follows_the_policy_while_the_cluster_lives() -> None:
    assert finalizer_actions(cluster(DeletionPolicy.DRAIN, held=False)) == (SetFinalizer(present=True),)
    assert finalizer_actions(cluster(DeletionPolicy.DRAIN, held=True)) == ()
    assert finalizer_actions(cluster(DeletionPolicy.IMMEDIATE, held=True)) == (SetFinalizer(present=False),)
    assert finalizer_actions(cluster(DeletionPolicy.IMMEDIATE, held=False)) == ()


def test_each_component_goes_when_the_pods_of_its_users_have_gone() -> None:
    made = bid_farewell(DRAINING, seen(SETS, [*engine_pods(2, "r"), *store_pods(2)]))
    assert (made.component, scaled(made)) == (Component.ENGINE, [("kv-engine-r", 0)])
    stopped = replace(SETS[0], replicas=0)
    made = bid_farewell(DRAINING, seen([stopped, SETS[1]], [*engine_pods(1, "r", deleting=True), *store_pods(2)]))
    assert (made.actions, made.waiting) == ((), "engine: kv-engine-r-0 is terminating")
    made = bid_farewell(DRAINING, seen([stopped, SETS[1]], store_pods(2)))
    assert (made.component, scaled(made)) == (Component.STORE, [("kv-store-dram", 0)])


def test_the_finalizer_goes_with_the_last_pod() -> None:
    stopped = [replace(item, replicas=0) for item in SETS]
    assert bid_farewell(DRAINING, seen(stopped)).actions == (SetFinalizer(present=False),)


def test_a_policy_changed_to_immediate_lets_go_at_once() -> None:
    made = bid_farewell(cluster(DeletionPolicy.IMMEDIATE, held=True), seen(SETS))
    assert made.actions == (SetFinalizer(present=False),)


def test_without_the_finalizer_owner_references_are_enough() -> None:
    assert bid_farewell(cluster(DeletionPolicy.DRAIN, held=False), seen(SETS)) == Farewell()


def test_workloads_of_others_do_not_hold_the_cluster() -> None:
    foreign = [replace(item, owner_uid="somebody") for item in SETS]
    assert bid_farewell(DRAINING, seen(foreign)).actions == (SetFinalizer(present=False),)
