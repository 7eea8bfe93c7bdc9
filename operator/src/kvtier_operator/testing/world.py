"""A cluster of Kubernetes in memory that plans are folded against: sets make pods, masters elect, drains end. Pure.

Everything that happens by chance comes from one seeded generator, so that a seed repeats a run. Time passes in ticks.
The world obeys every action like an API server would: preconditions count, and what is wrong in an action is not
softened. Whether an action was wise is for the referee to say.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import (
    Component,
    DrainPhase,
    DrainState,
    Manifest,
    MasterRole,
    MasterState,
    ObjectRef,
    Observed,
    ObservedObject,
    ObservedPod,
)
from kvtier_operator.planning.actions import (
    Action,
    Apply,
    CancelDrain,
    Delete,
    DeletePod,
    Emit,
    LabelPod,
    SaveLedger,
    Scale,
    SetFinalizer,
    StartDrain,
)
from kvtier_operator.planning.ledger import Ledger

TICK_S = 5.0
_WORKLOADS = ("StatefulSet", "Deployment")


class Conflict(Exception):
    """A precondition of an action does not hold any more; the pass ends."""


@dataclass(slots=True)
class WorldPod:
    """A pod; ``matures`` counts the ticks until it is ready, ``leaves`` those until it is gone."""

    name: str
    uid: str
    workload: ObjectRef
    component: Component
    group: str
    slot: int
    revision: str
    template: str
    matures: int
    leaves: int = 0
    failure: str = ""
    leader: bool = False
    caught_up: bool = False

    @property
    def ready(self) -> bool:
        """It serves."""
        return not (self.matures or self.leaves or self.failure)


@dataclass(slots=True)
class WorldObject:
    """An object as the API server has it."""

    live: Manifest
    uid: str


@dataclass(slots=True)
class Drainage:
    """A drain that was asked for."""

    phase: DrainPhase
    since: float
    lasts: int
    ends: DrainPhase


@dataclass(slots=True)
class Faults:
    """What may go wrong, each a chance per tick or occasion.

    Attributes:
        pod_dies: a ready pod vanishes.
        pod_fails: a pod fails for a few ticks instead of becoming ready.
        leader_lost: the leader steps down.
        edit: somebody changes or deletes a child by hand.
        conflict: somebody else writes the ledger first.
        cut: the operator dies before an action.
        drain_fails: a drain ends without success.
    """

    pod_dies: float = 0.0
    pod_fails: float = 0.0
    leader_lost: float = 0.0
    edit: float = 0.0
    conflict: float = 0.0
    cut: float = 0.0
    drain_fails: float = 0.0


@dataclass(slots=True)
class World:
    """Everything that the operator can see and change.

    Attributes:
        cluster: the object in the API server; tests change its spec.
        drains_supported: the masters have drain jobs.
        bad_revisions: engines of these never become ready.
        slow: ticks that a new pod takes.
    """

    cluster: KVCacheCluster
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    drains_supported: bool = True
    bad_revisions: set[str] = field(default_factory=set)
    slow: int = 2
    now: float = 1_000_000.0
    objects: dict[ObjectRef, WorldObject] = field(default_factory=dict)
    pods: dict[str, WorldPod] = field(default_factory=dict)
    drains: dict[str, Drainage] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    status: Mapping[str, Any] = field(default_factory=dict)
    events: list[Emit] = field(default_factory=list)
    gone: bool = False
    view_version: int = 0
    election: int = 0
    _leading: str = ""
    _uids: int = 0
    _chance: Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)  # noqa: S311 - a seed repeats a run

    def happens(self, probability: float) -> bool:
        """Decide by chance."""
        return probability > 0 and self._chance.random() < probability

    # What the operator sees.

    def observe(self) -> Observed:
        """The observation of this moment."""
        return Observed(
            objects={ref: self._observed(ref, item) for ref, item in self.objects.items()},
            pods=tuple(self._observed_pod(pod) for pod in self.pods.values()),
            masters={pod.name: self._master(pod) for pod in self._of(Component.MASTER) if pod.ready},
            segments=frozenset(pod.name for pod in self._of(Component.STORE) if pod.ready and self.leading),
            drains={
                name: DrainState(name, drain.phase, self.now - drain.since, f"job-{name}")
                for name, drain in self.drains.items()
                if name in self.pods
            },
            ledger=self.ledger,
            status=self.status,
            now=self.now,
        )

    @property
    def leading(self) -> WorldPod | None:
        """The master that serves."""
        pod = self.pods.get(self._leading)
        return pod if pod is not None and pod.ready else None

    def _observed(self, ref: ObjectRef, item: WorldObject) -> ObservedObject:
        meta = item.live["metadata"]
        owners = [owner["uid"] for owner in meta.get("ownerReferences", ())]
        return ObservedObject(
            ref,
            item.uid,
            owners[0] if owners else "",
            meta.get("annotations", {}).get(labels.APPLIED_HASH, ""),
            live=item.live,
            replicas=item.live.get("spec", {}).get("replicas") or 0,
            labels=meta.get("labels", {}),
        )

    def _observed_pod(self, pod: WorldPod) -> ObservedPod:
        workload = self.objects.get(pod.workload)
        return ObservedPod(
            pod.name,
            pod.uid,
            pod.component,
            pod.group,
            pod.slot,
            pod.revision or pod.template,
            up_to_date=workload is None or template_of(workload.live) == pod.template,
            ready=pod.ready,
            deleting=bool(pod.leaves),
            failure=pod.failure,
            waiting="" if pod.ready else "starting",
            ip="127.0.0.9",
            leader=pod.leader,
        )

    def _master(self, pod: WorldPod) -> MasterState:
        leads = pod is self.leading
        role = MasterRole.LEADER if leads else MasterRole.STANDBY
        return MasterState(pod.name, role, leads, view_version=self.view_version, caught_up=pod.caught_up)

    # What the operator does.

    def execute(self, action: Action) -> None:
        """Carry out one action.

        Raises:
            Conflict: its precondition does not hold.
        """
        match action:
            case Apply():
                self._apply(action)
            case Scale():
                self._with_uid(action.ref, action.uid).live["spec"]["replicas"] = action.replicas
            case Delete():
                self._with_uid(action.ref, action.uid)
                self.remove(action.ref)
            case DeletePod():
                self._pod_with_uid(action.name, action.uid).leaves = 2
            case LabelPod():
                pod = self._pod_with_uid(action.name, action.uid)
                pod.leader = action.labels[labels.MASTER_ROLE] == labels.LEADER
            case SaveLedger():
                self._save(action.ledger)
            case StartDrain():
                self._start_drain(self._pod_with_uid(action.pod, action.uid))
            case CancelDrain():
                self._pod_with_uid(action.pod, action.uid)
                self.drains.pop(action.pod, None)
            case SetFinalizer():
                self._set_finalizer(present=action.present)
            case Emit():
                self.events.append(action)

    def _apply(self, action: Apply) -> None:
        found = self.objects.get(action.ref)
        live = copy.deepcopy(action.manifest)
        if found is None:
            self.objects[action.ref] = WorldObject(live, self._uid())
        else:
            found.live = live

    def _save(self, ledger: Ledger) -> None:
        if self.happens(self.faults.conflict) or ledger.resource_version != self.ledger.resource_version:
            self.ledger = replace(self.ledger, resource_version=self._uid())
            raise Conflict("the ledger was written by somebody else")
        self.ledger = replace(ledger, resource_version=self._uid())

    def _start_drain(self, pod: WorldPod) -> None:
        if self.leading is None:
            raise Conflict("no master leads")
        if not self.drains_supported:
            self.drains[pod.name] = Drainage(DrainPhase.UNSUPPORTED, self.now, 0, DrainPhase.UNSUPPORTED)
            return
        ends = DrainPhase.FAILED if self.happens(self.faults.drain_fails) else DrainPhase.DONE
        self.drains[pod.name] = Drainage(DrainPhase.RUNNING, self.now, 1 + self._chance.randrange(3), ends)

    def _set_finalizer(self, *, present: bool) -> None:
        meta = self.cluster.metadata
        rest = tuple(name for name in meta.finalizers if name != labels.FINALIZER)
        finalizers = (*rest, labels.FINALIZER) if present else rest
        self.cluster = replace(self.cluster, metadata=replace(meta, finalizers=finalizers))

    def _with_uid(self, ref: ObjectRef, uid: str) -> WorldObject:
        found = self.objects.get(ref)
        if found is None or found.uid != uid:
            raise Conflict(f"{ref} is another one")
        return found

    def _pod_with_uid(self, name: str, uid: str) -> WorldPod:
        found = self.pods.get(name)
        if found is None or found.uid != uid:
            raise Conflict(f"{name} is another one")
        return found

    # What users and the cluster do.

    def add(self, manifest: Manifest) -> None:
        """Make an object that is not the operator's doing."""
        ref = ObjectRef(manifest["kind"], manifest["metadata"]["name"])
        self.objects[ref] = WorldObject(manifest, self._uid())

    def remove(self, ref: ObjectRef) -> None:
        """Delete an object; pods of a workload follow it."""
        del self.objects[ref]
        for pod in self.pods.values():
            if pod.workload == ref:
                pod.leaves = pod.leaves or 2

    def delete_cluster(self) -> None:
        """The user deletes the object."""
        self.cluster = replace(self.cluster, metadata=replace(self.cluster.metadata, deleting=True))

    @property
    def moving(self) -> bool:
        """Something will happen by itself."""
        ailing = (pod.failure and pod.revision not in self.bad_revisions for pod in self.pods.values())
        return bool(self.drains) or any(pod.matures or pod.leaves for pod in self.pods.values()) or any(ailing)

    def tick(self) -> None:
        """Let the controllers, the masters and chance work for a moment."""
        self.now += TICK_S
        if self.cluster.metadata.deleting and not self.cluster.metadata.finalizers:
            self.objects.clear()
            self.pods.clear()
            self.gone = True
            return
        self._stumble()
        self._keep_pods()
        self._elect()
        for name, drain in list(self.drains.items()):
            drain.lasts -= 1
            if name not in self.pods:
                del self.drains[name]
            elif drain.phase is DrainPhase.RUNNING and drain.lasts <= 0:
                drain.phase = drain.ends

    def _stumble(self) -> None:
        for pod in list(self.pods.values()):
            if pod.ready and self.happens(self.faults.pod_dies):
                del self.pods[pod.name]
        if self.happens(self.faults.leader_lost):
            self._leading = ""
        if self.objects and self.happens(self.faults.edit):
            ref = self._chance.choice(sorted(self.objects))
            if ref.kind in _WORKLOADS:
                self.objects[ref].live["metadata"]["labels"].pop(labels.PART_OF, None)
            else:
                self.remove(ref)

    def _keep_pods(self) -> None:
        for pod in list(self.pods.values()):
            if pod.leaves:
                pod.leaves -= 1
                if not pod.leaves:
                    del self.pods[pod.name]
            elif pod.matures:
                self._mature(pod)
            elif pod.failure and pod.revision not in self.bad_revisions and self.happens(0.3):
                pod.failure = ""
        for ref, item in self.objects.items():
            if ref.kind in _WORKLOADS:
                self._keep_workload(ref, item.live)

    def _mature(self, pod: WorldPod) -> None:
        pod.matures -= 1
        if not pod.matures and (pod.revision in self.bad_revisions or self.happens(self.faults.pod_fails)):
            pod.failure = "CrashLoopBackOff"

    def _keep_workload(self, ref: ObjectRef, live: Manifest) -> None:
        own, size = live["spec"]["template"]["metadata"]["labels"], live["spec"]["replicas"]
        for pod in self.pods.values():
            if pod.workload == ref and pod.slot >= size and not pod.leaves:
                pod.leaves = 2
        for slot in range(size):
            name = f"{ref.name}-{slot}"
            if name not in self.pods:
                group = own.get(labels.ROLE) or own.get(labels.POOL) or ""
                component = Component(own[labels.COMPONENT])
                revision, ticks = own.get(labels.REVISION, ""), 1 + self._chance.randrange(self.slow)
                self.pods[name] = WorldPod(
                    name, self._uid(), ref, component, group, slot, revision, template_of(live), ticks
                )

    def _elect(self) -> None:
        managed = self.cluster.coordination.managed
        alive = sum(pod.ready for pod in self._of(Component.ETCD))
        masters = [pod for pod in self._of(Component.MASTER) if pod.ready]
        if managed is not None and alive < managed.replicas // 2 + 1:
            self._leading = ""
            return
        leader = self.leading
        for pod in masters:
            pod.caught_up = leader is not None and (pod.caught_up or self.happens(0.5))
        if leader is not None:
            return
        self._leading = ""
        self.election += 1
        if masters and self.election > 1:
            self.election = 0
            self.view_version += 1
            self._leading = self._chance.choice(masters).name

    def _of(self, component: Component) -> Iterator[WorldPod]:
        return (pod for pod in self.pods.values() if pod.component is component)

    def _uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"


def template_of(workload: Manifest) -> str:
    """Hash of a workload's pod template."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
