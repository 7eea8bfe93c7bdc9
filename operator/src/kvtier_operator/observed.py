"""What the operator sees of one cluster: slim records that `observe` makes and that plans and status read. Pure.

Everything is recomputed from the API server and the running processes on each pass; nothing here is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from kvtier_operator.labels import APPLIED_HASH, LANE
from kvtier_operator.planning.ledger import BlockKey, Ledger
from kvtier_operator.planning.ports import PortBlock

Manifest = dict[str, Any]
"""A Kubernetes object as it would stand in YAML."""

WORKLOAD_KINDS: Final = frozenset({"StatefulSet", "Deployment"})
"""Kinds of children that make pods."""


class Component(StrEnum):
    """What a child of a cluster is for; value of the label ``app.kubernetes.io/component``."""

    ETCD = "etcd"
    MASTER = "master"
    STORE = "store"
    ENGINE = "engine"
    ROUTER = "router"


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    """One object in the cluster's namespace."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class ObservedObject:
    """One object that bears our labels, or the name of one that we want.

    Attributes:
        uid: for preconditions.
        owner_uid: uid of the controlling owner; empty = none. Another one than the cluster's makes the object foreign.
        applied_hash: of the manifest that we applied last (annotation ``kvtier.dev/applied-hash``).
        live: the object as the API server has it, without ``managedFields`` and, nearly, status; to find drift.
        replicas: wanted ones of a workload; 0 for others.
        labels: to find component, role, revision and lane again.
        deleting: a deletion timestamp is set.
        unseen: of a workload, its controller has not seen its newest spec: no pod of that can exist yet.
    """

    ref: ObjectRef
    uid: str
    owner_uid: str
    applied_hash: str
    live: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    unseen: bool = False


def observed_object(ref: ObjectRef, live: Manifest) -> ObservedObject:
    """A live object as plans see it."""
    meta = live["metadata"]
    owners = [item["uid"] for item in meta.get("ownerReferences") or () if item.get("controller")]
    return ObservedObject(
        ref=ref,
        uid=meta["uid"],
        owner_uid=owners[0] if owners else "",
        applied_hash=(meta.get("annotations") or {}).get(APPLIED_HASH, ""),
        live=live,
        replicas=(live.get("spec") or {}).get("replicas") or 0,
        labels=_labels(ref, live),
        deleting=bool(meta.get("deletionTimestamp")),
        unseen=ref.kind in WORKLOAD_KINDS and _seen_generation(live) < (meta.get("generation") or 0),
    )


def _seen_generation(workload: Manifest) -> int:
    """Generation of the spec that a workload's controller has worked with."""
    return (workload.get("status") or {}).get("observedGeneration") or 0


def _labels(ref: ObjectRef, live: Manifest) -> Mapping[str, str]:
    """Labels of an object; of a workload, those that its pods have count more.

    People edit the first without meaning anything by it, and a pool must not be emptied because it seems to have
    another name. What selects the pods can never be edited.
    """
    labels: Mapping[str, str] = live["metadata"].get("labels") or {}
    if ref.kind not in WORKLOAD_KINDS:
        return labels
    spec = live.get("spec") or {}
    of_pods = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    lane = {LANE: of_pods[LANE]} if LANE in of_pods else {}
    selected = (spec.get("selector") or {}).get("matchLabels") or {}
    return {**labels, **lane, **selected}


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One pod of the cluster.

    Attributes:
        component: what it is for.
        group: role of an engine, pool of a storage node; empty for others.
        slot: ordinal in its StatefulSet.
        revision: of an engine, the one of its set; of others, the hash of the pod template that it was made from.
        up_to_date: made from its set's newest template.
        ready: its Ready condition is true and it is not being deleted.
        failure: why it cannot become ready by itself (image, crash loop, port busy…), in words; empty = none.
        waiting: why it is not running yet, e.g. the scheduler's message.
        leader: it bears the leader label.
    """

    name: str
    uid: str
    component: Component
    group: str
    slot: int
    revision: str
    up_to_date: bool = True
    ready: bool = False
    deleting: bool = False
    failure: str = ""
    waiting: str = ""
    waiting_s: float = 0.0
    ip: str = ""
    leader: bool = False


class MasterRole(StrEnum):
    """What a master says of itself."""

    LEADER = "leader"
    STANDBY = "standby"
    UNKNOWN = "unknown"
    """It does not answer, or is neither yet."""


@dataclass(frozen=True, slots=True)
class MasterState:
    """One master's answer on its admin port.

    Attributes:
        pod: its name.
        serving: it is leader and answers clients.
        address: of the leader that it knows, host:port; empty = none.
        view_version: of the election that it knows.
        caught_up: a standby has applied the leader's log up to a small lag.
    """

    pod: str
    role: MasterRole = MasterRole.UNKNOWN
    serving: bool = False
    address: str = ""
    view_version: int = 0
    caught_up: bool = False


class DrainPhase(StrEnum):
    """How far a storage node's objects have moved."""

    RUNNING = "Running"
    DONE = "Done"
    FAILED = "Failed"
    UNSUPPORTED = "Unsupported"
    """The running master has no drain jobs: a graceful unmount has to do."""


@dataclass(frozen=True, slots=True)
class DrainState:
    """The drain of one storage pod, as the pod's annotations and the master's job tell it.

    Attributes:
        pod: its name.
        running_s: since it was asked for.
        detail: moved and blocked units, or why it failed.
    """

    pod: str
    phase: DrainPhase
    running_s: float
    job: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything known of one cluster at one moment.

    Attributes:
        objects: children, and objects of other owners that have the name of a wanted child.
        masters: by pod name; a pod without an answer is absent.
        segments: names of storage pods whose segment the leader lists.
        drains: by pod name.
        ledger: port blocks, with the resourceVersion that a write must name.
        stated: when the ledger of the host network is lost, the blocks that pods of all clusters there use.
        gone: owners in the ledger of the host network of whom nothing is left.
        optional_kinds: of the kinds that may be missing in a cluster (ServiceMonitor…), those that exist.
        status: the object's status as it stands, for what must not be forgotten (previous revisions and ids).
        now: seconds since the epoch.
    """

    objects: Mapping[ObjectRef, ObservedObject] = field(default_factory=dict)
    pods: tuple[ObservedPod, ...] = ()
    masters: Mapping[str, MasterState] = field(default_factory=dict)
    segments: frozenset[str] = frozenset()
    drains: Mapping[str, DrainState] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    stated: Mapping[BlockKey, PortBlock] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    optional_kinds: frozenset[str] = frozenset()
    status: Mapping[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def pods_of(self, component: Component, group: str = "") -> tuple[ObservedPod, ...]:
        """Pods of a component, by slot; of one role or pool if ``group`` is given."""
        found = [pod for pod in self.pods if pod.component is component and (not group or pod.group == group)]
        return tuple(sorted(found, key=lambda pod: (pod.group, pod.revision, pod.slot)))
