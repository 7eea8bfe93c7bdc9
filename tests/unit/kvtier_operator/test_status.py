"""What the status of a cluster says of each of its parts, and which phase follows from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtier_operator.api import Coordination, ManagedEtcd, Master, NetworkPolicies, PortRange
from kvtier_operator.observed import Component, DrainPhase, DrainState, ObjectRef
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.progress import Progress, RolloutProgress
from kvtier_operator.planning.wants import ports_needed
from kvtier_operator.testing.sample_status import (
    CLUSTER,
    NEW,
    NOON,
    OLD,
    SETTLED,
    SPLIT,
    TIERS,
    Seen,
    conditions,
    engine,
    message,
    pod,
    role,
    status,
)


def test_a_cluster_that_is_well() -> None:
    found = status()
    assert conditions(found) == {
        "Ready": "True/AsSpecified",
        "Available": "True/Serving",
        "Progressing": "False/Settled",
        "Degraded": "False/AsWanted",
        "SpecValid": "True/Valid",
        "PortsAllocated": "True/Allocated",
        "CoordinationReady": "True/Quorum",
        "MasterLeaderElected": "True/Elected",
        "MetadataDurable": "True/OpLog",
        "StoreReady": "True/AllServe",
        "RolesReady": "True/AllServe",
        "RouterReady": "True/NotNeeded",
        "RolloutHalted": "False/NotHalted",
        "DrainBlocked": "False/NotBlocked",
        "TransportPlaintext": "True/NoEncryption",
    }
    assert {one["observedGeneration"] for one in found["conditions"]} == {4}
    del found["conditions"]
    assert found == {
        "observedGeneration": 4,
        "phase": "Ready",
        "engines": "2/2",
        "leader": {"pod": "demo-master-h-1", "address": "10.0.0.1:20000", "viewVersion": 7, "since": NOON},
        "masters": {"desired": 3, "up": 3, "standbyCaughtUp": 2},
        "etcd": {"mode": "Managed", "desired": 3, "ready": 3},
        "store": {"ready": "2/2", "pools": [{"name": "dram", "desired": 2, "ready": 2}]},
        "roles": [
            {
                "name": "engine",
                "revision": NEW,
                "desired": 2,
                "ready": 2,
                "updated": 2,
                "lane": "B",
                "ports": "20000-20011",
            }
        ],
        "revisions": {"current": NEW},
        "model": {"effectiveID": "tiny"},
    }


def test_a_cluster_without_store_says_so_and_has_no_parts_of_it() -> None:
    tiers = replace(TIERS, store_enabled=False)
    cluster = replace(CLUSTER, roles=(replace(role(), tiers=tiers),), pools=(), coordination=Coordination())
    found = status(Seen(etcd=[], masters=[], stores=[]), cluster=cluster)
    assert found["phase"] == "Ready"
    assert not {"leader", "masters", "store", "etcd", "router"} & set(found)
    not_needed = ("CoordinationReady", "MasterLeaderElected", "MetadataDurable", "StoreReady")
    assert {conditions(found)[name] for name in not_needed} == {"True/NotNeeded"}
    assert conditions(found)["TransportPlaintext"] == "False/NotNeeded"


def test_what_starts_for_the_first_time_is_provisioned_and_not_degraded() -> None:
    seen = Seen(stores=[], engines=[], leader=None, status={})
    waits = ("masters: 3 of 3 are ready, none of them leads yet",)
    found = status(seen, Progress(Stage.MASTERS, waits, RolloutProgress(NEW)))
    assert found["phase"] == "Provisioning"
    told = conditions(found)
    assert (told["Ready"], told["Available"]) == ("False/MasterLeaderElected", "False/NoEngine")
    assert (told["Progressing"], told["Degraded"]) == ("True/Starting", "False/NotServedYet")
    assert (told["StoreReady"], told["RolesReady"]) == ("False/NoLeader", "False/Starting")
    assert message(found, "Progressing") == waits[0]
    assert (
        message(found, "MasterLeaderElected") == "no master leads; 3 of 3 of masters serve; look at the masters' logs"
    )
    assert (
        message(found, "RolesReady") == "0 of 2 of role engine serve; 2 not made yet; if it stays so, describe the set"
    )
    assert found["revisions"] == {"current": "", "updating": NEW}


def test_an_engine_that_waits_for_more_than_a_minute_names_what_the_scheduler_says() -> None:
    waiting: dict[str, Any] = {
        "ready": False,
        "waiting": "Unschedulable: 0/3 nodes are available: 3 Insufficient gpu",
    }
    short = status(Seen(engines=[engine(0), engine(1, **waiting, waiting_s=59.0)]))
    assert conditions(short)["RolesReady"] == "False/Starting"
    assert message(short, "RolesReady") == "1 of 2 of role engine serve; demo-engine-engine-bbbbbbbb-1 not ready yet"
    assert conditions(short)["Degraded"] == "False/AsWanted"
    long = status(Seen(engines=[engine(0), engine(1, **waiting, waiting_s=60.0)]))
    assert conditions(long)["RolesReady"] == "False/PodWaits"
    assert "demo-engine-engine-bbbbbbbb-1 is not ready (Unschedulable: 0/3 nodes" in message(long, "RolesReady")
    assert conditions(long)["Degraded"] == "True/PodWaits"
    assert (conditions(long)["Available"], long["phase"]) == ("True/Serving", "Degraded")


def test_an_engine_that_fails_degrades_even_a_cluster_that_never_served() -> None:
    broken = engine(0, ready=False, failure="CrashLoopBackOff: PortBusy: 20003 held by pid 7")
    found = status(Seen(engines=[broken], status={}))
    assert found["phase"] == "Degraded"
    assert conditions(found)["Degraded"] == "True/PodFailed"
    assert "PortBusy: 20003" in message(found, "Degraded")


def test_without_masters_engines_still_serve() -> None:
    found = status(Seen(masters=[], leader=None, segments=frozenset()))
    told = conditions(found)
    assert (told["Available"], told["Degraded"]) == ("True/Serving", "True/MasterLeaderElected")
    assert (told["Ready"], told["StoreReady"], found["phase"]) == (
        "False/MasterLeaderElected",
        "False/NoLeader",
        "Degraded",
    )
    assert "leader" not in found


def test_without_quorum_nothing_is_known_of_the_log() -> None:
    seen = Seen(etcd=[pod(Component.ETCD, 0), pod(Component.ETCD, 1, ready=False)])
    found = status(seen)
    assert conditions(found)["CoordinationReady"] == "False/NoQuorum"
    assert conditions(found)["MetadataDurable"] == "Unknown/NoQuorum"
    assert "1 of 3 of etcd serve" in message(found, "CoordinationReady")
    assert "2 are needed" in message(found, "CoordinationReady")
    two = status(Seen(etcd=[pod(Component.ETCD, 0), pod(Component.ETCD, 1)]))
    assert conditions(two)["CoordinationReady"] == "True/Quorum"
    assert "1 not made yet" in message(two, "CoordinationReady")


def test_a_single_master_is_not_durable_and_ready_all_the_same() -> None:
    cluster = replace(CLUSTER, master=Master(1, 10_000, 5_000), coordination=Coordination())
    found = status(Seen(etcd=[], masters=[pod(Component.MASTER)], leader=None), cluster=cluster)
    assert conditions(found)["MetadataDurable"] == "False/NotDurable"
    assert found["phase"] == "Ready"
    assert "etcd" not in found


def test_a_log_in_an_etcd_without_volumes_says_how_long_it_lives() -> None:
    cluster = replace(CLUSTER, coordination=Coordination(managed=ManagedEtcd(3)))
    assert "as long as a quorum of its pods" in message(status(cluster=cluster), "MetadataDurable")


def test_a_storage_node_that_the_leader_does_not_list_does_not_serve() -> None:
    seen = Seen(segments=frozenset({"demo-store-dram-h-0"}))
    found = status(seen)
    assert conditions(found)["StoreReady"] == "False/SegmentMissing"
    assert "demo-store-dram-h-1 not known to the leading master" in message(found, "StoreReady")
    assert found["store"]["ready"] == "1/2"
    assert conditions(found)["Degraded"] == "True/SegmentMissing"


def test_ports_that_do_not_fit_keep_a_new_cluster_pending_and_degrade_a_running_one() -> None:
    progress = replace(SETTLED, exhausted=("engine/B/0", "engine/B/1", "engine/B/2", "engine/B/3"), missing_ports=17)
    new = status(Seen(engines=[], status={}), progress)
    assert new["phase"] == "Pending"
    assert conditions(new)["PortsAllocated"] == "False/RangeExhausted"
    told = message(new, "PortsAllocated")
    assert told.startswith("engine/B/0, engine/B/1, engine/B/2 and 1 more do not fit into ports 20000 to 20099")
    assert "spec.transport.ports.range.size: 117" in told
    assert status(Seen(), progress)["phase"] == "Degraded"
    less = replace(progress, missing_ports=1)
    tight = replace(CLUSTER, transport=replace(CLUSTER.transport, ports=PortRange(20000, 40)))
    told = message(status(Seen(), less, tight), "PortsAllocated")
    assert f"range.size: {ports_needed(tight)}, " in told, "the webhook refuses less"


def test_a_port_that_somebody_else_has_is_named() -> None:
    taken = ("api/engine//-1 needs 8010-8010, which api/engine//-1 of llm.other.u9 has",)
    found = status(progress=replace(SETTLED, taken_ports=taken))
    assert conditions(found)["PortsAllocated"] == "False/PortTaken"
    assert "llm.other.u9" in message(found, "PortsAllocated")


def test_a_foreign_object_is_named_and_never_ready() -> None:
    foreign = {ObjectRef("StatefulSet", "demo-master"): "owned by nobody"}
    found = status(Seen(status={}), replace(SETTLED, conflicts=foreign))
    told = conditions(found)
    assert (told["Ready"], told["Degraded"], told["Progressing"]) == (
        "False/Conflict",
        "True/Conflict",
        "False/Conflict",
    )
    assert "StatefulSet/demo-master is not ours (owned by nobody); delete or rename it" in message(found, "Ready")


def test_a_drain_shows_its_pod_and_a_blocked_one_says_what_to_do() -> None:
    leaving = "demo-store-dram-h-1"
    drains = {leaving: DrainState(leaving, DrainPhase.RUNNING, 3.0, "j1", "2 of 9 units moved")}
    going = status(Seen(drains=drains), replace(SETTLED, draining=(leaving,), waiting_for=("demo",)))
    assert going["phase"] == "Draining"
    draining = going["store"]["pools"][0]["draining"]
    assert draining == [{"pod": leaving, "jobID": "j1", "phase": "Running", "detail": "2 of 9 units moved"}]
    progress = replace(SETTLED, draining=(leaving,), blocked_drains={leaving: "no room elsewhere; add a node"})
    blocked = status(Seen(drains=drains), progress)
    assert blocked["phase"] == "Degraded"
    assert conditions(blocked)["DrainBlocked"] == "True/DrainStopped"
    assert message(blocked, "DrainBlocked") == "demo-store-dram-h-1: no room elsewhere; add a node"


def test_a_cluster_whose_engines_are_scaled_to_zero_is_idle_and_as_specified() -> None:
    cluster = replace(CLUSTER, roles=(role(replicas=0),))
    found = status(Seen(engines=[]), cluster=cluster)
    assert found["phase"] == "Idle"
    told = conditions(found)
    assert (told["Ready"], told["Available"]) == ("True/ScaledToZero", "False/ScaledToZero")
    assert (told["RolesReady"], told["Degraded"]) == ("True/ScaledToZero", "False/AsWanted")


def test_paused_and_deleted_clusters_say_so_first() -> None:
    assert status(cluster=replace(CLUSTER, paused=True))["phase"] == "Paused"
    deleted = replace(CLUSTER, metadata=replace(CLUSTER.metadata, deleting=True), paused=True)
    found = status(
        progress=Progress(waiting_for=("store: demo-store-0 is terminating",), deleting="store"), cluster=deleted
    )
    assert found["phase"] == "Deleting"
    assert conditions(found)["Ready"] == "False/Deleting"
    assert message(found, "Progressing") == "store: demo-store-0 is terminating"


def test_split_roles_serve_only_with_both_of_one_revision_and_a_router() -> None:
    progress = Progress(rollout=RolloutProgress(NEW, OLD, units=1))
    both = [engine(0, "prefill", OLD), engine(0, "decode", OLD)]
    mixed = [engine(0, "prefill", OLD), engine(0, "decode", NEW)]
    router = [pod(Component.ROUTER)]
    assert conditions(status(Seen(engines=both, routers=router), progress, SPLIT))["Available"] == "True/Serving"
    apart = status(Seen(engines=mixed, routers=router), progress, SPLIT)
    assert conditions(apart)["Available"] == "False/NoEngine"
    assert "one revision serve together" in message(apart, "Available")
    alone = status(Seen(engines=both), progress, SPLIT)
    assert conditions(alone)["Available"] == "False/NoRouter"
    assert alone["router"] == {"desired": 1, "ready": 0}


def test_plaintext_says_whether_anything_keeps_others_away() -> None:
    open_to_all = replace(CLUSTER, network_policies=NetworkPolicies(enabled=False))
    assert "every pod can reach them" in message(status(cluster=open_to_all), "TransportPlaintext")
