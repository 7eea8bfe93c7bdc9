from collections.abc import Iterable

from kvtier_operator import labels
from kvtier_operator.api import (
    Coordination,
    KVCacheCluster,
    ManagedEtcd,
    Master,
    Metadata,
    Model,
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
from kvtier_operator.observed import Component, ObjectRef, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.allocation import adopt
from kvtier_operator.planning.in_use import annotation_of, live_keys, stated_blocks
from kvtier_operator.planning.layout import EngineSet, Layout
from kvtier_operator.planning.ledger import BlockKey, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.revision import Revision
from kvtier_operator.planning.wants import allocate_blocks, allocate_locally, local_key, owner_of, wants_of

NEW, OLD = Revision("bbbbbbbb", "B"), Revision("aaaaaaaa", "A")
TIERS = Tiers(0, 0.8, 2.0, store_enabled=True, prefetch_batch=8, prefetch_timeout_ms=1000)
OWNER = "llm.demo.u1"


def role(name: str = "engine", kind: RoleType = RoleType.FUSED, replicas: int = 2, tensor: int = 2) -> Role:
    return Role(name, kind, replicas, tensor, 8010, TIERS, {})


def cluster(
    *roles: Role, host_network: bool = False, size: int = 2000, uid: str = "u1", router: Router | None = None
) -> KVCacheCluster:
    return KVCacheCluster(
        name="demo",
        master=Master(3, 10_000, 5_000),
        pools=(StorePool("dram", StoreKind.KVTIER, 2, 1 << 30), StorePool("big", StoreKind.KVTIER, 1, 1 << 32)),
        transport=Transport(Protocol.TCP, shared_memory=False, ports=PortRange(20000, size), host_network=host_network),
        model=Model("/m", "tiny"),
        roles=roles or (role(),),
        metadata=Metadata("llm", uid),
        coordination=Coordination(managed=ManagedEtcd(3)),
        router=router,
    )


def layout(*, engines: int = 2, revision: Revision = NEW, router: int = 0, role_name: str = "engine") -> Layout:
    sets = (EngineSet(role_name, revision, engines),)
    return Layout(etcd=3, masters=3, pools={"dram": 2, "big": 1}, engines=sets, router=router)


def workload(
    component: Component, group: str = "", *, replicas: int = 1, revision: Revision | None = None, blocks: str = ""
) -> ObservedObject:
    found = {labels.COMPONENT: str(component)}
    if revision is not None:
        found |= {labels.ROLE: group, labels.REVISION: revision.name, labels.LANE: revision.lane}
    elif component is Component.STORE:
        found |= {labels.POOL: group}
    name = f"demo-{component}-{group}-{revision.name if revision else ''}"
    live = {"metadata": {"annotations": {labels.PORT_BLOCK: blocks}}}
    return ObservedObject(ObjectRef("StatefulSet", name), name, "u1", "", live, replicas, found)


def seen(
    objects: Iterable[ObservedObject] = (), pods: Iterable[ObservedPod] = (), ledger: Ledger | None = None
) -> Observed:
    return Observed({one.ref: one for one in objects}, tuple(pods), ledger=ledger or Ledger())


def engine_pod(slot: int, revision: str) -> ObservedPod:
    return ObservedPod(
        f"demo-engine-{revision}-{slot}", f"{revision}{slot}", Component.ENGINE, "engine", slot, revision
    )


def test_groups_with_addresses_of_their_own_get_one_block_and_slots_that_may_share_a_node_each_theirs() -> None:
    wants = {str(want.key): want.width for want in wants_of(cluster(), layout())}
    assert wants == {
        "etcd//-1": 2,
        "master//-1": 2,
        "store-dram//0": 11,
        "store-dram//1": 11,
        "store-big//0": 11,
        "engine/B/0": 1 + 2 + 8,
        "engine/B/1": 1 + 2 + 8,
    }
    assert {want.key.cluster for want in wants_of(cluster(), layout())} == {OWNER}


def test_split_roles_have_transfer_and_disaggregation_ports_for_each_rank() -> None:
    described = cluster(role("prefill", RoleType.PREFILL, tensor=4), role("decode", RoleType.DECODE))
    wants = wants_of(described, layout(role_name="prefill", router=1, engines=1))
    assert [want.width for want in wants if want.key.group == "prefill"] == [1 + 4 + 4 + 4 + 16]
    assert BlockKey(OWNER, "router", "", -1) in {want.key for want in wants}


def test_the_host_network_claims_the_http_ports_of_roles_but_not_of_a_router_with_its_own_address() -> None:
    described = cluster(host_network=True, router=Router(port=8888))
    fixed = {str(want.key): want.at for want in wants_of(described, layout(router=1)) if want.at is not None}
    assert fixed == {"api/engine//-1": 8010}
    assert not [want for want in wants_of(described, layout(engines=0)) if want.at is not None]
    assert not [want for want in wants_of(cluster(), layout()) if want.at is not None]


def test_nothing_is_wanted_for_what_has_no_replicas() -> None:
    assert wants_of(cluster(), Layout(engines=(EngineSet("engine", NEW, 0),))) == ()


def test_two_clusters_on_the_host_network_meet_neither_in_blocks_nor_in_http_ports() -> None:
    one, two = cluster(host_network=True), cluster(host_network=True, uid="u2")
    first = allocate_blocks(one, layout(), Ledger(), frozenset(), 0.0)
    second = allocate_blocks(two, layout(), first.ledger, frozenset(), 0.0)
    assert [str(overlap.key) for overlap in second.taken] == ["api/engine//-1"]
    assert second.taken[0].holder.cluster == OWNER


def test_pods_and_slots_that_a_workload_may_make_again_hold_their_blocks() -> None:
    observed = seen(
        [
            workload(Component.ENGINE, "engine", replicas=2, revision=OLD),
            workload(Component.STORE, "dram", replicas=1),
            workload(Component.MASTER, replicas=3),
        ],
        [
            engine_pod(4, OLD.name),
            ObservedPod("demo-store-dram-1", "x", Component.STORE, "dram", 1, "h"),
        ],
    )
    assert {str(key) for key in live_keys(cluster(), layout(), observed)} == {
        "engine/A/0",
        "engine/A/1",
        "engine/A/4",
        "store-dram//0",
        "store-dram//1",
        "master//-1",
        "api/engine//-1",
    }


def test_the_http_port_of_a_role_is_in_use_by_other_revisions_only() -> None:
    observed = seen([workload(Component.ENGINE, "engine", revision=NEW)], [engine_pod(0, NEW.name)])
    assert {str(key) for key in live_keys(cluster(), layout(), observed)} == {"engine/B/0"}


def test_the_http_port_of_engines_that_are_not_wanted_is_in_use_until_they_are_gone() -> None:
    described = cluster(router=Router())
    waiting = seen([workload(Component.ENGINE, "engine", replicas=1, revision=NEW)])
    assert "api/engine//-1" in {str(key) for key in live_keys(described, layout(engines=0), waiting)}
    going = seen(pods=[engine_pod(0, NEW.name), ObservedPod("r", "r", Component.ROUTER, "", 0, "h")])
    held = {str(key) for key in live_keys(described, layout(engines=0), going)}
    assert "api/engine//-1" in held
    assert "api/router//-1" not in held
    assert "api/engine//-1" not in {str(key) for key in live_keys(described, layout(router=1), going)}


def test_an_engine_whose_set_is_gone_holds_its_slot_in_both_lanes() -> None:
    keys = live_keys(cluster(), layout(), seen(pods=[engine_pod(0, "cccccccc")]))
    assert {"engine/A/0", "engine/B/0"} <= {str(key) for key in keys}


def test_objects_of_other_owners_hold_nothing() -> None:
    foreign = ObservedObject(ObjectRef("StatefulSet", "demo-master"), "x", "somebody", "", replicas=3)
    assert live_keys(cluster(), layout(), seen([foreign])) == frozenset()


def test_a_roll_takes_the_other_lane_and_gives_the_old_one_back_when_its_pods_are_gone() -> None:
    described = cluster()
    before = allocate_blocks(described, layout(revision=OLD), Ledger(), frozenset(), 0.0)
    old = workload(Component.ENGINE, "engine", replicas=2, revision=OLD)
    live = live_keys(described, layout(), seen([old]))
    during = allocate_blocks(described, layout(), before.ledger, live, 10.0)
    lanes = [(key.lane, entry.released_at) for key, entry in during.ledger.entries.items() if key.group == "engine"]
    assert sorted(lanes) == [("A", None), ("A", None), ("B", None), ("B", None)]
    after = allocate_blocks(described, layout(), during.ledger, frozenset(), 20.0)
    assert {entry.released_at for key, entry in after.ledger.entries.items() if key.lane == "A"} == {20.0}


def test_a_lost_ledger_is_made_again_from_the_annotations_of_living_sets() -> None:
    described = cluster(host_network=True)
    before = allocate_blocks(described, layout(), Ledger(), frozenset(), 0.0)

    def living(component: Component, group: str = "", revision: Revision | None = None) -> ObservedObject:
        lane = revision.lane if revision else ""
        blocks = annotation_of(described, component, group, lane, before.blocks)
        return workload(component, group, replicas=2, revision=revision, blocks=blocks)

    objects = [
        living(Component.ETCD),
        living(Component.MASTER),
        living(Component.STORE, "dram"),
        living(Component.STORE, "big"),
        living(Component.ENGINE, "engine", NEW),
        workload(Component.ENGINE, "engine", replicas=0, revision=OLD, blocks="-1:8010-8010,0:20000-20010"),
    ]
    again = adopt(Ledger(), stated_blocks(owner_of(described), objects, ()))
    assert again.entries == before.ledger.entries
    assert allocate_blocks(described, layout(), again, frozenset(), 0.0).ledger is again


def test_a_scaled_down_set_states_the_blocks_of_its_last_pods_only() -> None:
    old = workload(Component.ENGINE, "engine", replicas=0, revision=OLD, blocks="-1:8010-8010,0:20000-20010,1:30-40")
    found = stated_blocks(OWNER, [old], [engine_pod(1, OLD.name)])
    assert found == {
        BlockKey(OWNER, "engine", "A", 1): PortBlock(30, 41),
        BlockKey(OWNER, "api/engine", "", -1): PortBlock(8010, 8011),
    }


def test_an_annotation_names_the_blocks_of_its_own_set() -> None:
    described = cluster(host_network=True)
    blocks = allocate_blocks(described, layout(), Ledger(), frozenset(), 0.0).blocks
    assert annotation_of(described, Component.MASTER, "", "", blocks) == "-1:20002-20003"
    assert annotation_of(described, Component.STORE, "big", "", blocks) == "0:20026-20036"
    engines = annotation_of(described, Component.ENGINE, "engine", "B", blocks)
    assert engines == "-1:8010-8010,0:20037-20047,1:20048-20058"
    assert annotation_of(described, Component.ENGINE, "engine", "A", blocks) == "-1:8010-8010"


def test_the_local_runtime_gives_every_process_its_own_block_in_a_fixed_order() -> None:
    described = cluster(uid="")
    allocation = allocate_locally(described)
    assert allocation == allocate_locally(described)
    assert [str(key) for key in allocation.blocks] == [
        *(f"etcd//{slot}" for slot in range(3)),
        *(f"master//{slot}" for slot in range(3)),
        "store-dram//0",
        "store-dram//1",
        "store-big//0",
        "engine/A/0",
        "engine/A/1",
    ]
    assert allocation.blocks[local_key("demo", Component.MASTER, slot=1)] == PortBlock(20008, 20010)
    assert local_key("demo", Component.ENGINE, "engine", 1) == BlockKey("demo", "engine", "A", 1)


def test_a_range_that_is_too_small_says_by_how_much() -> None:
    whole = allocate_blocks(cluster(), layout(), Ledger(), frozenset(), 0.0)
    needed = max(block.stop for block in whole.blocks.values()) - 20000
    refused = allocate_blocks(cluster(size=needed - 5), layout(), Ledger(), frozenset(), 0.0)
    assert refused.refused
    assert refused.missing == 5
    assert refused.blocks == {}
