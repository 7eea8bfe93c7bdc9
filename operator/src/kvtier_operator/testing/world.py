"""A cluster of Kubernetes in memory that plans are folded against: sets make pods, masters elect, drains end. Pure.

Everything that happens by chance comes from one seeded generator, so that a seed repeats a run. Time passes in
`world_life`. The world obeys every action like an API server would: preconditions count, and what is wrong in an action
is not softened. Whether an action was wise is for the `referee` to say.
"""

from __future__ import annotations

import copy
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
from kvtier_operator.testing.world_records import Conflict, Drainage, Faults, WorldObject, WorldPod, template_of

_PATIENCE_S = 700.0
"""Longer than any drain may take in these tests."""


@dataclass(slots=True)
class World:
    """Everything that the operator can see and change.

    Attributes:
        cluster: the object in the API server; tests change its spec.
        seed: of everything that happens by chance.
        faults: what may go wrong from now on.
        drains_supported: the masters have drain jobs.
        bad_revisions: engines of these never become ready.
        slow: ticks that a new pod takes at most.
        now: seconds since the epoch.
        objects, pods, drains, ledger, status, events: what the operator sees and writes.
        forgotten: drains that masters know and nobody else, by the uid of their pod.
        gone: the cluster has been deleted with everything.
        leader_name: the master that won the last election; whether it serves is `leading`.
        view_version: of that election.
        election: ticks since the masters began the next one.
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
    forgotten: dict[str, Drainage] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    status: Mapping[str, Any] = field(default_factory=dict)
    events: list[Emit] = field(default_factory=list)
    gone: bool = False
    view_version: int = 0
    election: int = 0
    leader_name: str = ""
    _uids: int = 0
    chance: Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = Random(self.seed)  # noqa: S311 - a seed repeats a run

    def happens(self, probability: float) -> bool:
        """Decide by chance."""
        return probability > 0 and self.chance.random() < probability

    def observe(self) -> Observed:
        """The observation of this moment."""
        return Observed(
            objects={ref: self._observed(ref, item) for ref, item in self.objects.items()},
            pods=tuple(self._observed_pod(pod) for pod in self.pods.values()),
            masters={pod.name: self._master(pod) for pod in self.of(Component.MASTER) if pod.ready},
            segments=frozenset(pod.name for pod in self.of(Component.STORE) if pod.ready and self.leading),
            drains={
                name: DrainState(name, drain.phase, self.now - drain.since, f"job-{name}")
                for name, drain in self.drains.items()
                if name in self.pods and self.pods[name].uid == drain.uid
            },
            ledger=self.ledger,
            status=self.status,
            now=self.now,
        )

    @property
    def leading(self) -> WorldPod | None:
        """The master that serves."""
        pod = self.pods.get(self.leader_name)
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
                self._cancel_drain(self._pod_with_uid(action.pod, action.uid))
            case SetFinalizer():
                self._set_finalizer(present=action.present)
            case Emit():
                self.events.append(action)

    def _apply(self, action: Apply) -> None:
        found = self.objects.get(action.ref)
        live = copy.deepcopy(action.manifest)
        if found is None:
            self.objects[action.ref] = WorldObject(live, self.next_uid())
        else:
            found.live = live

    def _save(self, ledger: Ledger) -> None:
        if self.happens(self.faults.conflict) or ledger.resource_version != self.ledger.resource_version:
            self.ledger = replace(self.ledger, resource_version=self.next_uid())
            raise Conflict("the ledger was written by somebody else")
        self.ledger = replace(ledger, resource_version=self.next_uid())

    def _start_drain(self, pod: WorldPod) -> None:
        if self.leading is None:
            raise Conflict("no master leads")
        if not self.drains_supported:
            self.drains[pod.name] = Drainage(pod.uid, DrainPhase.UNSUPPORTED, self.now, 0, DrainPhase.UNSUPPORTED)
            return
        if (begun := self.forgotten.pop(pod.uid, None)) is not None:
            self.drains[pod.name] = replace(begun, since=self.now)
            return
        ends = DrainPhase.FAILED if self.happens(self.faults.drain_fails) else DrainPhase.DONE
        drain = Drainage(pod.uid, DrainPhase.RUNNING, self.now, 1 + self.chance.randrange(3), ends)
        if self.happens(self.faults.drain_forgotten):
            self.forgotten[pod.uid] = drain
            raise Conflict("the operator died before it wrote the job down")
        self.drains[pod.name] = drain

    def _cancel_drain(self, pod: WorldPod) -> None:
        """As a master does: nothing while objects are on their way, and a segment that was emptied stays closed."""
        drain = self.drains.get(pod.name)
        if drain is None or drain.phase is DrainPhase.DONE:
            return
        if drain.phase is DrainPhase.RUNNING and self.happens(self.faults.drain_moves):
            return
        del self.drains[pod.name]

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

    def add(self, manifest: Manifest) -> None:
        """Make an object that is not the operator's doing."""
        ref = ObjectRef(manifest["kind"], manifest["metadata"]["name"])
        self.objects[ref] = WorldObject(manifest, self.next_uid())

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
        draining = self.cluster.uses_store and any(self.now - one.since < _PATIENCE_S for one in self.drains.values())
        standbys = [pod for pod in self.of(Component.MASTER) if pod is not self.leading]
        behind = self.leading is None or not all(pod.caught_up for pod in standbys)
        starting = any(pod.matures or pod.leaves for pod in self.pods.values())
        return draining or starting or any(ailing) or (bool(standbys) and behind)

    def of(self, component: Component) -> Iterator[WorldPod]:
        """Pods of a component."""
        return (pod for pod in self.pods.values() if pod.component is component)

    def next_uid(self) -> str:
        """A uid that nothing has had."""
        self._uids += 1
        return f"uid-{self._uids}"
