"""Hypothesis plays users, kubelets and two operators on one host-network ledger and checks that no ports ever meet.

The operators read, then act, with anything in between: the other one's writes, dying pods, a lost ledger. An operator
may be killed after each write. Sets and pods are dictionaries here; what decides is the code of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvtier_operator import labels
from kvtier_operator.api import (
    KVCacheCluster,
    Master,
    Metadata,
    Model,
    PortRange,
    Protocol,
    Role,
    RoleType,
    StoreKind,
    StorePool,
    Tiers,
    Transport,
)
from kvtier_operator.observed import Component, ObjectRef, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.allocation import adopt, release_absent
from kvtier_operator.planning.in_use import annotation_of, live_keys, stated_blocks
from kvtier_operator.planning.layout import EngineSet, Layout
from kvtier_operator.planning.ledger import QUARANTINE_S, BlockKey, Ledger
from kvtier_operator.planning.ledger_data import ledger_data, read_ledger, read_slots
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.revision import Revision
from kvtier_operator.planning.wants import allocate_blocks, api_key, block_key, owner_of, wants_of

NAMES = ("a", "b", "c")
LEASE_S = 10.0
TIERS = Tiers(0, 0.8, 2.0, store_enabled=True, prefetch_batch=8, prefetch_timeout_ms=1000)


@dataclass
class Wish:
    """What a user wrote."""

    uid: str
    start: int
    size: int
    port: int
    nodes: int = 1
    engines: int = 1
    tensor: int = 1
    revision: int = 0


@dataclass
class Workload:
    component: Component
    group: str
    replicas: int
    blocks: dict[int, PortBlock]
    lane: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Pod:
    owner: str
    set_name: str
    slot: int
    key: BlockKey
    ports: tuple[PortBlock, ...]
    component: Component
    group: str
    revision: str


@dataclass
class World:
    now: float = 1000.0
    data: dict[str, str] | None = None
    version: int = 0
    sets: dict[str, dict[str, Workload]] = field(default_factory=dict)
    pods: dict[tuple[str, str, int], Pod] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What an operator saw before it acts."""

    at: float
    version: int
    ledger: Ledger
    cluster: KVCacheCluster
    observed: Observed


class LedgerMachine(RuleBasedStateMachine):
    @initialize(shift=st.integers(0, 60), sizes=st.tuples(*[st.integers(20, 150)] * 3))
    def start(self, *, shift: int, sizes: tuple[int, int, int]) -> None:
        self.world = World()
        self.wishes = {
            name: Wish(f"u{index}", 20000 + shift * index, sizes[index], 8000 + index)
            for index, name in enumerate(NAMES)
        }
        self.uids = len(NAMES)
        self.readings: dict[int, Reading] = {}
        self.used_until: dict[int, tuple[BlockKey, float]] = {}

    @rule(
        name=st.sampled_from(NAMES),
        nodes=st.integers(0, 3),
        engines=st.integers(0, 3),
        tensor=st.integers(1, 3),
        roll=st.booleans(),
    )
    def wish(self, *, name: str, nodes: int, engines: int, tensor: int, roll: bool) -> None:
        if wish := self.wishes.get(name):
            wish.nodes, wish.engines = nodes, engines
            if roll:
                wish.tensor, wish.revision = tensor, wish.revision + 1
            self.settle(leaving=True)

    @rule(leaving=st.booleans())
    def settle(self, *, leaving: bool) -> None:
        """Everybody does what there is to do; pods that should leave may take their time."""
        for name in self.wishes:
            self._act(self._read(name), stop_after_ledger=False)
        if leaving:
            self.end_unwanted_pods()
        self.start_pods()

    @rule(name=st.sampled_from(NAMES), start=st.integers(20000, 20100), size=st.integers(20, 150))
    def move_range(self, *, name: str, start: int, size: int) -> None:
        if wish := self.wishes.get(name):
            wish.start, wish.size = start, size

    @rule(name=st.sampled_from(NAMES))
    def delete_or_make(self, *, name: str) -> None:
        if name in self.wishes:
            wish = self.wishes.pop(name)
            self.world.sets.pop(owner_of(described(name, wish)), None)
            if self.world.data is None:
                # Only sets state blocks: with set and ledger gone at once nothing tells what its last pods use.
                self.end_unwanted_pods()
                self.used_until = {}
        else:
            self.wishes[name] = Wish(f"u{self.uids}", 20000, 120, 8000 + NAMES.index(name))
            self.uids += 1

    @rule(operator=st.sampled_from([0, 1]), name=st.sampled_from(NAMES))
    def read(self, *, operator: int, name: str) -> None:
        if name in self.wishes:
            self.readings[operator] = self._read(name)

    @rule(operator=st.sampled_from([0, 1]), killed=st.sampled_from(["never", "before", "after the ledger"]))
    def act(self, *, operator: int, killed: str) -> None:
        reading = self.readings.pop(operator, None)
        if reading is not None and killed != "before":
            self._act(reading, stop_after_ledger=killed != "never")

    @rule()
    def both_operators_want_the_same_pass(self) -> None:
        if self.wishes:
            reading = self._read(min(self.wishes))
            self._act(reading, stop_after_ledger=False)
            self._act(reading, stop_after_ledger=False)

    @rule()
    def release_gone_clusters(self) -> None:
        alive = {owner_of(described(name, wish)) for name, wish in self.wishes.items()}
        present = frozenset(alive | {pod.owner for pod in self.world.pods.values()})
        ledger = self._ledger()
        self._save(release_absent(ledger, present, self.world.now), self.world.version)

    @rule()
    def start_pods(self) -> None:
        for owner, sets in self.world.sets.items():
            for name, workload in sets.items():
                for slot in range(workload.replicas):
                    if (owner, name, slot) not in self.world.pods:
                        self._start_pod(owner, name, workload, slot)

    @rule(data=st.data())
    def end_pod(self, data: st.DataObject) -> None:
        if self.world.pods:
            self._end_pod(data.draw(st.sampled_from(sorted(self.world.pods))))

    @rule()
    def end_unwanted_pods(self) -> None:
        for place in list(self.world.pods):
            workload = self.world.sets.get(place[0], {}).get(place[1])
            if workload is None or place[2] >= workload.replicas:
                self._end_pod(place)

    @rule(seconds=st.sampled_from([1.0, 8.0, 30.0, QUARANTINE_S]))
    def pass_time(self, *, seconds: float) -> None:
        self.world.now += seconds
        fresh = {one: reading for one, reading in self.readings.items() if self.world.now - reading.at < LEASE_S}
        self.readings = fresh  # a replica that was away for longer than its Lease lasts may not write

    @rule()
    def lose_the_ledger(self) -> None:
        self.end_unwanted_pods()
        self.world.data, self.readings, self.used_until = None, {}, {}

    @invariant()
    def no_two_pods_have_a_port_in_common(self) -> None:
        owned = [(ports, pod) for pod in self.world.pods.values() for ports in pod.ports]
        for (ports, pod), (others, other) in combinations(owned, 2):
            # Pods of one role share its HTTP port and hence never a node.
            common_api = ports == others and ports.width == 1 and (pod.owner, pod.group) == (other.owner, other.group)
            assert common_api or pod is other or not ports.meets(others), (pod, other)

    @invariant()
    def the_ledger_knows_every_port_in_use(self) -> None:
        if self.world.data is not None:
            claimed = {(block.start, block.stop, key.cluster) for block, key in self._ledger().claims()}
            for pod in self.world.pods.values():
                assert all((ports.start, ports.stop, pod.owner) in claimed for ports in pod.ports), pod

    def _read(self, name: str) -> Reading:
        cluster = described(name, self.wishes[name])
        ledger = self._ledger()
        return Reading(self.world.now, self.world.version, ledger, cluster, self._observed(cluster, ledger))

    def _act(self, reading: Reading, *, stop_after_ledger: bool) -> None:
        """One pass: ledger first; nothing is made of blocks that were not saved, or not given."""
        layout = layout_of(reading.cluster, reading.observed)
        live = live_keys(reading.cluster, layout, reading.observed)
        given = allocate_blocks(reading.cluster, layout, reading.observed.ledger, live, self.world.now)
        self._check_given(reading, layout, given.blocks)
        if not self._save(given.ledger, reading.version) or stop_after_ledger or given.refused:
            return
        if owner_of(reading.cluster) in {owner_of(described(name, wish)) for name, wish in self.wishes.items()}:
            self._apply(reading.cluster, layout, given.blocks)

    def _check_given(self, reading: Reading, layout: Layout, blocks: Mapping[BlockKey, PortBlock]) -> None:
        """Blocks have the width that was asked for; new ones lie in the range, and old ones stay where they are."""
        ports = reading.cluster.transport.ports
        for want in wants_of(reading.cluster, layout):
            block, known = blocks.get(want.key), reading.ledger.entries.get(want.key)
            if block is None:
                continue
            assert block.width == want.width
            if known is not None and known.block.width == want.width and _inside(known.block, ports):
                assert block == known.block
            elif want.at is None and (known is None or known.block != block):
                assert _inside(block, ports)

    def _save(self, ledger: Ledger, version: int) -> bool:
        """Write under the precondition of the resourceVersion; a stale reader loses even if it has nothing to write,
        since its Lease is not renewed either."""
        if version != self.world.version:
            return False
        if self.world.data is None or ledger_data(ledger) != self.world.data:
            self.world.data = ledger_data(ledger)
            self.world.version += 1
        return True

    def _ledger(self) -> Ledger:
        if self.world.data is not None:
            return read_ledger(self.world.data, str(self.world.version))
        ledger = Ledger()
        for owner in self.world.sets:
            found = stated_blocks(owner, self._objects(owner), self._pods(owner))
            ledger = adopt(ledger, found)
            assert {*found.values()} <= {block for block, _ in ledger.claims()}, "stated blocks meet others"
        return ledger

    def _apply(self, cluster: KVCacheCluster, layout: Layout, blocks: Mapping[BlockKey, PortBlock]) -> None:
        owner = owner_of(cluster)
        sets = self.world.sets.setdefault(owner, {})

        def put(name: str, component: Component, group: str, replicas: int, revision: Revision | None = None) -> None:
            lane = revision.lane if revision else ""
            text = annotation_of(cluster, component, group, lane, blocks)
            workload = Workload(
                component, group, replicas, dict(read_slots(text)), lane, revision.name if revision else ""
            )
            sets[name] = workload

        put("master", Component.MASTER, "", layout.masters)
        put("store-dram", Component.STORE, "dram", layout.pools["dram"])
        for name, workload in sets.items():
            if workload.component is Component.ENGINE and workload.revision != self._revision(cluster):
                sets[name] = Workload(**{**vars(workload), "replicas": 0})
        for engines in layout.engines:
            put(f"engine-{engines.revision.name}", Component.ENGINE, "engine", engines.replicas, engines.revision)

    def _revision(self, cluster: KVCacheCluster) -> str:
        return revision_of(cluster)

    def _start_pod(self, owner: str, name: str, workload: Workload, slot: int) -> None:
        key = block_key(owner, workload.component, workload.group, workload.lane, slot)
        ports = [workload.blocks[slot if slot in workload.blocks else -1]]
        keys = [key]
        if workload.component is Component.ENGINE:
            ports.append(workload.blocks[-1])
            keys.append(api_key(owner, workload.group))
        for one, block in zip(keys, ports, strict=True):
            for port in range(block.start, block.stop):
                last, until = self.used_until.get(port, (one, 0.0))
                assert last == one or self.world.now >= until, f"{port} was {last}'s a moment ago"
        pod = Pod(owner, name, slot, key, tuple(ports), workload.component, workload.group, workload.revision)
        self.world.pods[owner, name, slot] = pod

    def _end_pod(self, place: tuple[str, str, int]) -> None:
        pod = self.world.pods.pop(place)
        for block, key in zip(pod.ports, (pod.key, api_key(pod.owner, pod.group)), strict=False):
            for port in range(block.start, block.stop):
                self.used_until[port] = (key, self.world.now + QUARANTINE_S)

    def _objects(self, owner: str) -> Iterator[ObservedObject]:
        for name, workload in self.world.sets.get(owner, {}).items():
            found = {labels.COMPONENT: str(workload.component)}
            if workload.component is Component.ENGINE:
                found |= {labels.ROLE: workload.group, labels.LANE: workload.lane, labels.REVISION: workload.revision}
            elif workload.component is Component.STORE:
                found |= {labels.POOL: workload.group}
            text = ",".join(f"{slot}:{block}" for slot, block in workload.blocks.items())
            live = {"metadata": {"annotations": {labels.PORT_BLOCK: text}}}
            uid = owner.rsplit(".", 1)[1]
            yield ObservedObject(ObjectRef("StatefulSet", name), name, uid, "", live, workload.replicas, found)

    def _pods(self, owner: str) -> tuple[ObservedPod, ...]:
        return tuple(
            ObservedPod(pod.set_name, str(pod.slot), pod.component, pod.group, pod.slot, pod.revision)
            for pod in self.world.pods.values()
            if pod.owner == owner
        )

    def _observed(self, cluster: KVCacheCluster, ledger: Ledger) -> Observed:
        owner = owner_of(cluster)
        objects = {found.ref: found for found in self._objects(owner)}
        return Observed(objects, self._pods(owner), ledger=ledger, now=self.world.now)


def _inside(block: PortBlock, ports: PortRange) -> bool:
    return ports.start <= block.start and block.stop <= ports.stop


def described(name: str, wish: Wish) -> KVCacheCluster:
    return KVCacheCluster(
        name=name,
        master=Master(1, 10_000, 5_000),
        pools=(StorePool("dram", StoreKind.KVTIER, wish.nodes, 1 << 30),),
        transport=Transport(
            Protocol.TCP, shared_memory=False, ports=PortRange(wish.start, wish.size), host_network=True
        ),
        model=Model("/m", "tiny", revision=str(wish.revision)),
        roles=(Role("engine", RoleType.FUSED, wish.engines, wish.tensor, wish.port, TIERS, {}),),
        metadata=Metadata("ns", wish.uid),
    )


def revision_of(cluster: KVCacheCluster) -> str:
    return f"r{cluster.model.revision}"


def layout_of(cluster: KVCacheCluster, observed: Observed) -> Layout:
    """The newest revision gets the lane that no other revision's pods are in; none is free: it waits."""
    target = revision_of(cluster)
    sets = [found for found in observed.objects.values() if labels.LANE in found.labels]
    mine = [found.labels[labels.LANE] for found in sets if found.labels[labels.REVISION] == target]
    busy_revisions = {pod.revision for pod in observed.pods if pod.component is Component.ENGINE}
    busy = {
        found.labels[labels.LANE]
        for found in sets
        if found.labels[labels.REVISION] != target
        and (found.replicas or found.labels[labels.REVISION] in busy_revisions)
    }
    free = mine or [lane for lane in ("A", "B") if lane not in busy]
    engines = (EngineSet("engine", Revision(target, free[0]), cluster.roles[0].replicas),) if free else ()
    return Layout(masters=1, pools={"dram": cluster.pools[0].replicas}, engines=engines)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
