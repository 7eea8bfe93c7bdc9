from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_operator import labels
from kvtier_operator.api import (
    Coordination,
    Durability,
    KVCacheCluster,
    ManagedEtcd,
    Master,
    Metadata,
    Model,
    NetworkPolicies,
    PortRange,
    Protocol,
    Role,
    RoleType,
    Router,
    StoreKind,
    StorePool,
    Tiers,
    Transport,
)
from kvtier_operator.errors import LedgerError, SpecError, Violation
from kvtier_operator.observed import (
    Component,
    DrainPhase,
    DrainState,
    MasterRole,
    MasterState,
    ObjectRef,
    Observed,
    ObservedObject,
    ObservedPod,
)
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ledger_data import FIX
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.progress import Progress, RolloutProgress
from kvtier_operator.reconcile import refuse
from kvtier_operator.status import Phase, damaged_ledger_status, invalid_status, refused_status, status_of

NOW = 1_767_225_600.0
NOON = "2026-01-01T00:00:00Z"
NEW, OLD = "bbbbbbbb", "aaaaaaaa"
TIERS = Tiers(0, 0.8, 2.0, store_enabled=True, prefetch_batch=8, prefetch_timeout_ms=1000)
SETTLED = Progress(rollout=RolloutProgress(NEW, NEW, units_done=2, units=2))

Status = dict[str, Any]


def role(name: str = "engine", kind: RoleType = RoleType.FUSED, replicas: int = 2) -> Role:
    return Role(name, kind, replicas, 1, 8010, TIERS, {})


CLUSTER = KVCacheCluster(
    name="demo",
    master=Master(3, 10_000, 5_000, Durability.OPLOG),
    pools=(StorePool("dram", StoreKind.KVTIER, 2, 1 << 30),),
    transport=Transport(Protocol.TCP, shared_memory=False, ports=PortRange(20000, 100)),
    model=Model("/m", "tiny"),
    roles=(role(),),
    metadata=Metadata("llm", "u1", generation=4),
    coordination=Coordination(managed=ManagedEtcd(3, storage_bytes=1 << 30)),
)
SPLIT = replace(
    CLUSTER, roles=(role("prefill", RoleType.PREFILL, 1), role("decode", RoleType.DECODE, 1)), router=Router()
)


def pod(component: Component, slot: int = 0, group: str = "", revision: str = "h", **facts: Any) -> ObservedPod:
    name = "-".join(part for part in ("demo", str(component), group, revision, str(slot)) if part)
    return ObservedPod(name, name, component, group, slot, revision, **{"ready": True, **facts})


def engine(slot: int = 0, group: str = "engine", revision: str = NEW, **facts: Any) -> ObservedPod:
    return pod(Component.ENGINE, slot, group, revision, **facts)


@dataclass
class Seen:
    """A cluster that is well, until a test changes a part of it."""

    etcd: list[ObservedPod] = field(default_factory=lambda: [pod(Component.ETCD, slot) for slot in range(3)])
    masters: list[ObservedPod] = field(default_factory=lambda: [pod(Component.MASTER, slot) for slot in range(3)])
    stores: list[ObservedPod] = field(default_factory=lambda: [pod(Component.STORE, slot, "dram") for slot in range(2)])
    engines: list[ObservedPod] = field(default_factory=lambda: [engine(slot) for slot in range(2)])
    routers: list[ObservedPod] = field(default_factory=list)
    leader: int | None = 1
    status: Status = field(default_factory=lambda: {"revisions": {"current": NEW}})
    segments: frozenset[str] | None = None
    drains: dict[str, DrainState] = field(default_factory=dict)

    def observed(self) -> Observed:
        states = {
            one.name: MasterState(
                one.name,
                MasterRole.LEADER if one.slot == self.leader else MasterRole.STANDBY,
                serving=one.slot == self.leader,
                address="10.0.0.1:20000",
                view_version=7,
                caught_up=True,
            )
            for one in self.masters
        }
        engine_set = ObjectRef("StatefulSet", f"demo-engine-{NEW}")
        found = {labels.ROLE: "engine", labels.REVISION: NEW, labels.LANE: "B"}
        blocks = {
            BlockKey("llm.demo.u1", "engine", lane, slot): Entry(
                PortBlock(start + 6 * slot, start + 6 * slot + 6), until
            )
            for lane, start, until in (("A", 20040, NOW), ("B", 20000, None))
            for slot in range(2)
        }
        return Observed(
            objects={engine_set: ObservedObject(engine_set, "s1", "u1", "", replicas=2, labels=found)},
            pods=(*self.etcd, *self.masters, *self.stores, *self.engines, *self.routers),
            masters=states,
            segments=frozenset(one.name for one in self.stores) if self.segments is None else self.segments,
            drains=self.drains,
            ledger=Ledger(blocks),
            status=self.status,
            now=NOW,
        )


def status(seen: Seen | None = None, progress: Progress = SETTLED, cluster: KVCacheCluster = CLUSTER) -> Status:
    return status_of(cluster, (seen or Seen()).observed(), progress)


def conditions(found: Status) -> dict[str, str]:
    return {one["type"]: f"{one['status']}/{one['reason']}" for one in found["conditions"]}


def message(found: Status, name: str) -> str:
    return next(str(one["message"]) for one in found["conditions"] if one["type"] == name)


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


def test_a_rollout_tells_its_units_and_is_not_degraded_by_weights_that_load_slowly() -> None:
    loading = engine(0, ready=False, waiting="ContainersNotReady", waiting_s=300.0)
    seen = Seen(engines=[engine(0, revision=OLD), loading], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=RolloutProgress(NEW, OLD, units_done=0, units=2), waiting_for=("one",)))
    assert found["phase"] == "RollingOut"
    assert message(found, "Progressing") == f"revision {NEW}: 0 of 2 units serve; one"
    assert found["revisions"] == {"current": OLD, "updating": NEW}
    assert (found["roles"][0]["ready"], found["roles"][0]["updated"]) == (1, 0)
    assert message(found, "Available").startswith(f"revision {OLD}: ")


def test_no_cluster_is_ready_while_a_pod_of_the_old_revision_is_there() -> None:
    seen = Seen(engines=[engine(0), engine(1), engine(0, revision=OLD, deleting=True, ready=False)])
    assert conditions(status(seen))["Ready"] == "False/Outdated"
    outdated = Seen(masters=[pod(Component.MASTER, slot, up_to_date=slot != 1) for slot in range(3)])
    assert conditions(status(outdated))["Ready"] == "False/Outdated"
    assert "demo-master-h-1" in message(status(outdated), "Ready")


def test_a_halted_rollout_says_why_and_how_to_go_on() -> None:
    rollout = RolloutProgress(NEW, OLD, units=2, halted="demo-engine-bbbbbbbb-0 is not ready (CrashLoopBackOff)")
    seen = Seen(engines=[engine(0, revision=OLD), engine(1, revision=OLD)], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=rollout))
    assert found["phase"] == "Degraded"
    assert conditions(found)["RolloutHalted"] == "True/PodFailed"
    assert f"write the spec of revision {OLD} again" in message(found, "RolloutHalted")
    assert conditions(found)["Progressing"] == "False/RolloutHalted"
    assert conditions(found)["Available"] == "True/Serving"


def test_a_supervised_rollout_waits_and_says_what_to_type() -> None:
    seen = Seen(engines=[engine(0, revision=OLD), engine(1, revision=OLD)], status={"revisions": {"current": OLD}})
    found = status(seen, Progress(rollout=RolloutProgress(NEW, OLD, units=2, approval_wanted=True)))
    assert found["phase"] == "WaitingForApproval"
    assert f"kubectl annotate kvc demo kvtier.dev/approve={NEW}" in message(found, "Progressing")


def test_ports_that_do_not_fit_keep_a_new_cluster_pending_and_degrade_a_running_one() -> None:
    progress = replace(SETTLED, exhausted=("engine/B/0", "engine/B/1", "engine/B/2", "engine/B/3"), missing_ports=17)
    new = status(Seen(engines=[], status={}), progress)
    assert new["phase"] == "Pending"
    assert conditions(new)["PortsAllocated"] == "False/RangeExhausted"
    told = message(new, "PortsAllocated")
    assert told.startswith("engine/B/0, engine/B/1, engine/B/2 and 1 more do not fit into ports 20000 to 20099")
    assert "spec.transport.ports.range.size: 117" in told
    assert status(Seen(), progress)["phase"] == "Degraded"


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


def test_times_stay_until_a_status_flips() -> None:
    first = status()
    later = replace(Seen(status=first).observed(), now=NOW + 100.0)
    again = status_of(CLUSTER, later, SETTLED)
    assert again == first
    lost = replace(Seen(status=first, masters=[], leader=None).observed(), now=NOW + 100.0)
    times = {one["type"]: one["lastTransitionTime"] for one in status_of(CLUSTER, lost, SETTLED)["conditions"]}
    flipped = {name for name, time in times.items() if time == "2026-01-01T00:01:40Z"}
    assert flipped == {"Ready", "Degraded", "MasterLeaderElected", "StoreReady"}
    assert {time for name, time in times.items() if name not in flipped} == {NOON}


def test_a_new_leader_leads_since_now_and_the_same_one_since_it_was_elected() -> None:
    first = status()
    same = status_of(CLUSTER, replace(Seen(status=first).observed(), now=NOW + 9.0), SETTLED)
    assert same["leader"]["since"] == NOON
    other = status_of(CLUSTER, replace(Seen(status=first, leader=2).observed(), now=NOW + 9.0), SETTLED)
    assert (other["leader"]["pod"], other["leader"]["since"]) == ("demo-master-h-2", "2026-01-01T00:00:09Z")


def test_a_change_of_the_model_keeps_the_former_namespaces_newest_first() -> None:
    seen = Seen()
    for number in range(13):
        model = Model("/m", "tiny", revision=str(number))
        found = status(seen, cluster=replace(CLUSTER, model=model))
        seen = Seen(status=found)
    ids = [found["model"]["effectiveID"], *found["model"]["previousIDs"]]
    assert len(ids) == len(set(ids)) == 11
    back = status(seen, cluster=replace(CLUSTER, model=Model("/m", "tiny", revision="11")))
    assert back["model"]["effectiveID"] == ids[1]
    assert back["model"]["previousIDs"][:2] == [ids[0], ids[2]]


def test_a_revision_that_serves_no_more_stays_current_until_another_one_serves() -> None:
    found = status(Seen(engines=[], status={"revisions": {"current": OLD}}))
    assert found["revisions"] == {"current": OLD, "updating": NEW}
    assert found["phase"] == "Degraded"
    assert conditions(found)["Degraded"] == "True/Available"


def test_an_invalid_spec_says_everything_and_keeps_what_was_said_of_the_children() -> None:
    before = status()
    body = {"metadata": {"name": "demo", "generation": 5}, "status": before}
    error = SpecError([Violation("spec.roles", [], "write one"), Violation("spec.master.replicas", 0, "write 1")])
    found = invalid_status(body, error, NOW + 5.0)
    told = conditions(found)
    assert (found["phase"], found["observedGeneration"]) == ("Failed", 5)
    assert (told["SpecValid"], told["Ready"]) == ("False/Invalid", "False/SpecInvalid")
    assert (told["Available"], told["StoreReady"]) == ("True/Serving", "True/AllServe")
    assert "spec.roles = []: write one; spec.master.replicas = 0: write 1" in message(found, "SpecValid")
    assert list(told) == list(conditions(before))
    assert {**found, "conditions": 0, "phase": 0, "observedGeneration": 0} == {
        **before,
        "conditions": 0,
        "phase": 0,
        "observedGeneration": 0,
    }
    assert invalid_status({**body, "status": found}, error, NOW + 50.0) == found


def test_an_object_that_the_server_never_accepts_is_told_in_every_word_people_look_at() -> None:
    before = status()
    found = refused_status(before, before, "Service/x: 422; delete it", NOW + 5.0)
    told = conditions(found)
    assert found["phase"] == "Degraded"
    assert {told["Ready"], told["Progressing"], told["Degraded"]} == {"False/ApplyRefused", "True/ApplyRefused"}
    assert (told["Available"], told["StoreReady"]) == ("True/Serving", "True/AllServe")
    assert message(found, "Ready") == "Service/x: 422; delete it"
    assert list(told) == list(conditions(before))
    assert {**found, "conditions": 0, "phase": 0} == {**before, "conditions": 0, "phase": 0}


def test_a_refusal_that_goes_on_keeps_its_time() -> None:
    first = refused_status(status(), status(), "as before", NOW + 5.0)
    assert refused_status(status(), first, "as before", NOW + 300.0) == first


def test_an_invalid_spec_of_a_new_object_has_the_three_conditions_that_are_known() -> None:
    found = invalid_status({"metadata": {"name": "x"}}, SpecError([Violation("spec", None, "write it")]), NOW)
    assert list(conditions(found)) == ["Ready", "Progressing", "SpecValid"]


def test_a_damaged_ledger_is_told_by_the_cluster_that_waits_for_it() -> None:
    error = LedgerError(["ledger data['x']: is no JSON"], FIX)
    running = damaged_ledger_status({"metadata": {"generation": 4}, "status": status()}, error, NOW)
    told = conditions(running)
    assert (told["PortsAllocated"], told["Ready"]) == ("False/LedgerDamaged", "False/PortsAllocated")
    assert (told["Available"], running["phase"]) == ("True/Serving", "Degraded")
    assert "delete the ConfigMap" in message(running, "PortsAllocated")
    assert damaged_ledger_status({"metadata": {}}, error, NOW)["phase"] == "Pending"
    body = {"metadata": {"generation": 4}, "status": status()}
    assert refuse(body, error, NOW) == running
    assert refuse(body, SpecError([Violation("spec", 1, "no")]), NOW)["phase"] == "Failed"


def test_plaintext_says_whether_anything_keeps_others_away() -> None:
    open_to_all = replace(CLUSTER, network_policies=NetworkPolicies(enabled=False))
    assert "every pod can reach them" in message(status(cluster=open_to_all), "TransportPlaintext")


_GROUPS = {Component.STORE: "dram", Component.ENGINE: "engine"}
_PODS = st.lists(
    st.builds(
        lambda component, slot, revision, facts: pod(component, slot, _GROUPS.get(component, ""), revision, **facts),
        st.sampled_from(list(Component)),
        st.integers(0, 3),
        st.sampled_from([OLD, NEW]),
        st.fixed_dictionaries(
            {
                "ready": st.booleans(),
                "up_to_date": st.booleans(),
                "deleting": st.just(False),
                "failure": st.sampled_from(["", "CrashLoopBackOff"]),
                "waiting_s": st.sampled_from([0.0, 70.0]),
            }
        ),
    ),
    max_size=16,
    unique_by=lambda one: one.name,
)
_PROGRESS = st.builds(
    Progress,
    stage=st.none() | st.sampled_from(list(Stage)),
    waiting_for=st.lists(st.just("pod"), max_size=1).map(tuple),
    rollout=st.builds(
        RolloutProgress,
        target=st.sampled_from(["", OLD, NEW]),
        current=st.sampled_from(["", OLD, NEW]),
        approval_wanted=st.booleans(),
        halted=st.sampled_from(["", "x failed"]),
    ),
    exhausted=st.lists(st.just("engine/A/0"), max_size=1).map(tuple),
)


def seen_of(pods: Iterable[ObservedPod], leader: int | None, before: Status) -> Seen:
    def of(component: Component) -> list[ObservedPod]:
        return [one for one in pods if one.component is component]

    return Seen(
        of(Component.ETCD),
        of(Component.MASTER),
        of(Component.STORE),
        of(Component.ENGINE),
        leader=leader,
        status=before,
    )


@given(_PODS, st.none() | st.integers(0, 3), _PROGRESS, st.booleans())
def test_ready_means_available_complete_and_at_rest_and_phases_follow(
    pods: list[ObservedPod], leader: int | None, progress: Progress, served: bool
) -> None:
    before: Status = {"revisions": {"current": NEW}} if served else {}
    found = status(seen_of(pods, leader, before), progress)
    holds = {one["type"]: one["status"] == "True" for one in found["conditions"]}
    assert len(holds) == 15
    if holds["Ready"]:
        needed = ("Available", "RolesReady", "StoreReady", "MasterLeaderElected", "CoordinationReady", "PortsAllocated")
        assert all(holds[name] for name in needed)
        assert not holds["Progressing"]
        assert not [one for one in pods if not one.up_to_date]
        assert found["roles"][0]["updated"] >= found["roles"][0]["desired"]
    assert (found["phase"] == Phase.READY) == (
        holds["Ready"] and not any(holds[bad] for bad in ("Degraded", "RolloutHalted", "DrainBlocked"))
    )
    assert all(one["reason"] and one["message"] is not None for one in found["conditions"])
    again = status_of(CLUSTER, replace(seen_of(pods, leader, found).observed(), now=NOW + 5.0), progress)
    same = {
        one["type"]: one["lastTransitionTime"] for one in again["conditions"] if one["status"] == holds_text(found, one)
    }
    assert set(same.values()) <= {NOON}


def holds_text(found: Status, condition: Status) -> str:
    return next(str(one["status"]) for one in found["conditions"] if one["type"] == condition["type"])


@given(_PODS, st.none() | st.integers(0, 3), _PROGRESS, st.data())
def test_a_pod_that_becomes_ready_never_makes_anything_worse(
    pods: list[ObservedPod], leader: int | None, progress: Progress, data: st.DataObject
) -> None:
    unready = [index for index, one in enumerate(pods) if not one.ready]
    if not unready:
        return
    before = status(seen_of(pods, leader, {}), progress)
    index = data.draw(st.sampled_from(unready))
    better = [
        replace(one, ready=True, failure="", waiting_s=0.0) if at == index else one for at, one in enumerate(pods)
    ]
    after = status(seen_of(better, leader, {}), progress)
    for one in before["conditions"]:
        now_holds = holds_text(after, one)
        if one["status"] == "True" and one["type"] not in {"Degraded", "RolloutHalted", "DrainBlocked"}:
            assert now_holds == "True", one
    if holds_text(before, {"type": "Degraded"}) == "False":
        assert holds_text(after, {"type": "Degraded"}) == "False"


@pytest.mark.parametrize("field_name", ["leader", "model", "revisions", "conditions"])
def test_a_status_that_lost_a_part_is_made_whole(field_name: str) -> None:
    before = status()
    del before[field_name]
    assert set(status(Seen(status=before))) == {*before, field_name}
