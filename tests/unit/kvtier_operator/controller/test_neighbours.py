from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from kvtier_operator import labels
from kvtier_operator.controller.index import Index, record_of
from kvtier_operator.controller.neighbours import blocks_of_all, gone_owners
from kvtier_operator.observed import Observed
from kvtier_operator.planning.actions import SaveLedger
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.reconcile import reconcile
from kvtier_operator.testing.sample_clusters import sample_cluster

_VERSIONS = count(1)
BLOCK = PortBlock(20000, 20011)


def put(
    index: Index, kind: str, name: str, body: dict[str, Any], *, uid: str = "", cluster: str = "", owner: str = ""
) -> None:
    found = {labels.CLUSTER: cluster, labels.COMPONENT: "store", labels.POOL: "dram"} if cluster else {}
    meta: dict[str, Any] = {
        "name": name,
        "namespace": "llm",
        "uid": uid or name,
        "resourceVersion": str(next(_VERSIONS)),
        "labels": found,
        "annotations": {labels.PORT_BLOCK: "0:20000-20010,1:20011-20021"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    if owner:
        meta["ownerReferences"] = [{"kind": "KVCacheCluster", "name": cluster, "uid": owner, "controller": True}]
    index.put(record_of(kind, {"metadata": meta, **body}))


def index_with(
    *, host: bool = True, replicas: int = 1, pods: int = 1, cluster: bool = True, workload: bool = True
) -> Index:
    index = Index()
    if cluster:
        put(index, "KVCacheCluster", "a", {"spec": {"transport": {"hostNetwork": host}}}, uid="u1")
    if workload:
        spec = {"spec": {"replicas": replicas}}
        put(index, "StatefulSet", "a-store-dram", spec, cluster="a", owner="u1")
    for slot in range(pods):
        put(index, "Pod", f"a-store-dram-{slot}", {}, cluster="a")
    return index


LEDGER = Ledger({BlockKey("llm.a.u1", "store-dram", "", 0): Entry(BLOCK)})


def test_a_lost_ledger_of_the_host_network_is_told_by_the_sets_of_all_clusters() -> None:
    assert blocks_of_all(index_with()) == {BlockKey("llm.a.u1", "store-dram", "", 0): BLOCK}
    assert len(blocks_of_all(index_with(pods=2))) == 2


def test_clusters_on_the_pod_network_have_no_part_in_it() -> None:
    assert blocks_of_all(index_with(host=False)) == {}


def test_an_owner_is_there_as_long_as_its_cluster_workload_or_pods_are() -> None:
    for there in (
        index_with(),
        index_with(workload=False, pods=0),
        index_with(cluster=False, pods=0),
        index_with(cluster=False, workload=False),
    ):
        assert gone_owners(there, LEDGER) == frozenset()
    nothing = index_with(cluster=False, workload=False, pods=0)
    assert gone_owners(nothing, LEDGER) == {"llm.a.u1"}


def test_a_new_cluster_of_the_same_name_does_not_keep_the_former_one_there() -> None:
    index = index_with(cluster=False, workload=False)
    put(index, "KVCacheCluster", "a", {"spec": {}}, uid="u2")
    assert gone_owners(index, LEDGER) == {"llm.a.u1"}


def saved(observed: Observed) -> Ledger:
    """The ledger that a pass over a cluster of the host network saves."""
    transport = replace(sample_cluster().transport, host_network=True)
    plan = reconcile(sample_cluster(transport=transport), observed)
    return next(action.ledger for action in plan.actions if isinstance(action, SaveLedger))


def test_a_pass_takes_up_the_blocks_of_all_clusters_when_the_ledger_is_lost() -> None:
    neighbour = {BlockKey("llm.a.u1", "store-dram", "", 0): BLOCK}
    ledger = saved(Observed(stated=neighbour, now=5.0))
    assert ledger.entries[BlockKey("llm.a.u1", "store-dram", "", 0)] == Entry(BLOCK)
    assert not [key for key, entry in ledger.entries.items() if key.cluster != "llm.a.u1" and entry.block.meets(BLOCK)]


def test_a_pass_releases_what_clusters_had_that_are_gone() -> None:
    ledger = saved(Observed(ledger=replace(LEDGER, resource_version="7"), gone=frozenset({"llm.a.u1"}), now=5.0))
    assert ledger.entries[BlockKey("llm.a.u1", "store-dram", "", 0)] == Entry(BLOCK, released_at=5.0)
