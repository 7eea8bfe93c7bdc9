from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtier_operator import labels
from kvtier_operator.observed import Component, ObjectRef, ObservedObject
from kvtier_operator.planning.actions import Delete, Scale
from kvtier_operator.planning.engines import EnginesPlan
from kvtier_operator.planning.leftovers import Leftovers, clear_leftovers
from kvtier_operator.planning.progress import RolloutProgress
from kvtier_operator.planning.revision import Revision
from kvtier_operator.testing.sample_clusters import UID, sample_cluster, sample_role
from kvtier_operator.testing.sample_pods import engine_pods, seen, store_pods, workload

AT_REST = EnginesPlan(Revision("r", "A"), {"engine": 2}, progress=RolloutProgress("r", "r"))
STORE_SET = workload(Component.STORE, 0, "gone")


def other(kind: str, name: str, component: Component, **own: str) -> ObservedObject:
    named = {labels.COMPONENT: str(component), **own}
    return ObservedObject(ObjectRef(kind, name), f"uid-{name}", UID, "", labels=named)


def clear(*objects: ObservedObject, engines: EnginesPlan = AT_REST, settled: bool = True, **more: Any) -> Leftovers:
    cluster, wanted = more.pop("cluster", sample_cluster()), more.pop("wanted", ())
    return clear_leftovers(cluster, seen(objects, **more), wanted, engines, settled=settled)


def orders(made: Leftovers) -> list[str]:
    return [
        f"{type(action).__name__} {action.ref.name}" for action in made.actions if isinstance(action, Delete | Scale)
    ]


def test_what_nobody_wants_is_deleted_and_what_others_own_is_not() -> None:
    unwanted = other("PodDisruptionBudget", "kv-master", Component.MASTER)
    assert orders(clear(unwanted)) == ["Delete kv-master"]
    assert orders(clear(unwanted, wanted=[unwanted.ref])) == []
    assert orders(clear(replace(unwanted, owner_uid="somebody"))) == []
    assert orders(clear(replace(unwanted, deleting=True))) == []


def test_the_ledger_is_never_cleared_away() -> None:
    assert orders(clear(other("ConfigMap", "kv-ports", Component.MASTER))) == []


def test_a_budget_goes_at_once_when_its_only_pod_must_stay_evictable() -> None:
    budget = other("PodDisruptionBudget", "kv-engine", Component.ENGINE, **{labels.ROLE: "engine"})
    assert orders(clear(budget, pods=engine_pods(1, "r"))) == ["Delete kv-engine"]


def test_services_of_a_dropped_pool_wait_for_its_last_pod() -> None:
    service = other("Service", "kv-store-gone", Component.STORE, **{labels.POOL: "gone"})
    made = clear(STORE_SET, service, pods=store_pods(1, "gone", deleting=True))
    assert orders(made) == []
    assert made.waiting
    assert orders(clear(STORE_SET, service)) == ["Delete kv-store-gone", "Delete kv-store-gone"]


def test_a_dropped_pool_is_not_scaled_down_here_but_drained() -> None:
    made = clear(replace(STORE_SET, replicas=2), pods=store_pods(2, "gone"))
    assert (orders(made), made.waiting) == ([], "StatefulSet/kv-store-gone is emptied node by node")


def test_a_store_without_users_goes_when_the_engines_that_used_it_have_left() -> None:
    cluster = sample_cluster(roles=[sample_role(store=False)], pools=[])
    sets = [workload(Component.STORE, 2, "dram"), workload(Component.MASTER, 3), workload(Component.ETCD, 3)]
    rolling = replace(AT_REST, progress=RolloutProgress("r", "old"))
    assert orders(clear(*sets, cluster=cluster, engines=rolling, pods=store_pods(2))) == []
    assert orders(clear(*sets, cluster=cluster, settled=False, pods=store_pods(2))) == []
    made = clear(*sets, cluster=cluster, pods=store_pods(2))
    assert "Scale kv-store-dram" in orders(made)
    assert "Scale kv-master" not in orders(made)


def test_objects_of_engine_revisions_are_left_to_the_rollout() -> None:
    former = workload(Component.ENGINE, 0, "engine", "old", "B")
    assert orders(clear(former)) == []


def test_nothing_of_the_engines_goes_while_a_rollout_waits_for_approval() -> None:
    service = other("Service", "kv-dropped", Component.ENGINE, **{labels.ROLE: "dropped"})
    assert orders(clear(service, engines=replace(AT_REST, rendered=False))) == []
    assert orders(clear(service, pods=engine_pods(1, "old", "dropped"))) == []
    assert orders(clear(service)) == ["Delete kv-dropped"]
