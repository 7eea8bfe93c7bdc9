"""A cluster that is well, as observed, and its status: what tests of the status start from. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import (
    Coordination,
    Durability,
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
from kvtier_operator.observed import (
    Component,
    DrainState,
    MasterRole,
    MasterState,
    ObjectRef,
    Observed,
    ObservedObject,
    ObservedPod,
)
from kvtier_operator.planning.ledger import BlockKey, Entry, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.progress import Progress, RolloutProgress
from kvtier_operator.status import status_of

NOW = 1_767_225_600.0
NOON = "2026-01-01T00:00:00Z"
"""The same as `NOW`."""
NEW, OLD = "bbbbbbbb", "aaaaaaaa"
"""Revisions."""
TIERS = Tiers(0, 0.8, 2.0, store_enabled=True, prefetch_batch=8, prefetch_timeout_ms=1000)
SETTLED = Progress(rollout=RolloutProgress(NEW, NEW, units_done=2, units=2))

Status = dict[str, Any]


def role(name: str = "engine", kind: RoleType = RoleType.FUSED, replicas: int = 2) -> Role:
    """Engines of one role."""
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
    """A pod of `CLUSTER` that is ready, unless the facts say otherwise."""
    name = "-".join(part for part in ("demo", str(component), group, revision, str(slot)) if part)
    return ObservedPod(name, name, component, group, slot, revision, **{"ready": True, **facts})


def engine(slot: int = 0, group: str = "engine", revision: str = NEW, **facts: Any) -> ObservedPod:
    """The pod of an engine that is ready, unless the facts say otherwise."""
    return pod(Component.ENGINE, slot, group, revision, **facts)


@dataclass
class Seen:
    """What is observed of `CLUSTER`: all is well, until a test changes a part of it.

    Attributes:
        etcd: its pods.
        masters: their pods.
        stores: their pods.
        engines: their pods.
        routers: their pods.
        leader: slot of the master that leads; None = none does.
        status: that the object has.
        segments: pods that the leader lists; None = all of ``stores``.
        drains: by pod.
    """

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
        """The observation at `NOW`."""
        engine_set = ObjectRef("StatefulSet", f"demo-engine-{NEW}")
        found = {labels.ROLE: "engine", labels.REVISION: NEW, labels.LANE: "B"}
        return Observed(
            objects={engine_set: ObservedObject(engine_set, "s1", "u1", "", replicas=2, labels=found)},
            pods=(*self.etcd, *self.masters, *self.stores, *self.engines, *self.routers),
            masters={one.name: self._master(one) for one in self.masters},
            segments=frozenset(one.name for one in self.stores) if self.segments is None else self.segments,
            drains=self.drains,
            ledger=_ledger(),
            status=self.status,
            now=NOW,
        )

    def _master(self, one: ObservedPod) -> MasterState:
        return MasterState(
            one.name,
            MasterRole.LEADER if one.slot == self.leader else MasterRole.STANDBY,
            serving=one.slot == self.leader,
            address="10.0.0.1:20000",
            view_version=7,
            caught_up=True,
        )


def status(seen: Seen | None = None, progress: Progress = SETTLED, cluster: KVCacheCluster = CLUSTER) -> Status:
    """The status of a cluster.

    Args:
        seen: None = all is well.
        progress: of the pass.
        cluster: as specified.
    """
    return status_of(cluster, (seen or Seen()).observed(), progress)


def conditions(found: Status) -> dict[str, str]:
    """Status and reason of each condition, by its type."""
    return {one["type"]: f"{one['status']}/{one['reason']}" for one in found["conditions"]}


def message(found: Status, name: str) -> str:
    """What one condition says."""
    return next(str(one["message"]) for one in found["conditions"] if one["type"] == name)


def _ledger() -> Ledger:
    """Ports of both engines, and those of two former ones in the other lane, which nobody wants since `NOW`."""
    return Ledger(
        {
            BlockKey("llm.demo.u1", "engine", lane, slot): Entry(
                PortBlock(start + 6 * slot, start + 6 * slot + 6), until
            )
            for lane, start, until in (("A", 20040, NOW), ("B", 20000, None))
            for slot in range(2)
        }
    )
