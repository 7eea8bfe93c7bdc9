"""What a plan may ask for. Pure records; `apply` carries them out, each idempotent and with its precondition.

The order of a plan's actions is the order of execution. An executor stops at the first that fails; the next pass plans
again from what it then observes, so that being killed between any two actions does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtier_operator.observed import Manifest, ObjectRef
from kvtier_operator.planning.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one complete object. Planned only when hash, drift or absence call for it.

    Precondition: no object of that name belongs to somebody else.
    """

    manifest: Manifest
    why: str

    @property
    def ref(self) -> ObjectRef:
        """What is applied."""
        return ObjectRef(self.manifest["kind"], self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Scale:
    """Set the replicas of a workload of an older revision, whose template the spec no longer describes."""

    ref: ObjectRef
    uid: str
    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete one object if it still has this uid."""

    ref: ObjectRef
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod if it still has this uid; its set makes it anew from the newest template."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class LabelPod:
    """Set or, with None, remove labels of one pod that still has this uid."""

    name: str
    uid: str
    labels: Mapping[str, str | None]
    why: str


@dataclass(frozen=True, slots=True)
class SaveLedger:
    """Write the port ledger if it still has the resourceVersion that it was read with. A conflict ends the pass."""

    ledger: Ledger


@dataclass(frozen=True, slots=True)
class StartDrain:
    """Ask the leader to move a storage pod's objects, and remember the job and the time on the pod."""

    pod: str
    uid: str
    segment: str


@dataclass(frozen=True, slots=True)
class CancelDrain:
    """End a drain that is not wanted any more, and forget it on the pod."""

    pod: str
    uid: str
    job: str


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    """Add or remove our finalizer on the KVCacheCluster."""

    present: bool


@dataclass(frozen=True, slots=True)
class Emit:
    """An event on the KVCacheCluster; equal ones are repeated at most every five minutes.

    Attributes:
        warning: of type Warning instead of Normal.
        reason: one of the documented words, e.g. ``LeaderElected``.
    """

    reason: str
    message: str
    warning: bool = False


Action = Apply | Scale | Delete | DeletePod | LabelPod | SaveLedger | StartDrain | CancelDrain | SetFinalizer | Emit


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass over one cluster.

    Attributes:
        actions: in order.
        status: the whole status that the object should have; written only where it differs.
        requeue_after_s: look again after this long without any event; 0 = only the regular resync.
    """

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    requeue_after_s: float = 0.0
