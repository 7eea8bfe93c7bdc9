"""Carries out the actions of a plan against the Kubernetes API and the masters. IO; called by `loop`.

Each action is idempotent and states its precondition, so that a plan can be cut off between any two of them and the
next pass plans again. The first that fails ends the pass. What the server answers goes into the index at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.api.units import timestamp
from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.events import Events
from kvtier_operator.controller.index import ClusterKey, Index, Record, record_of
from kvtier_operator.controller.leadership import Fence
from kvtier_operator.controller.ledger_object import is_ledger, ledger_manifest
from kvtier_operator.controller.masters import AdminAddress, DrainUnsupported, MasterAdmin, MasterSilent, MastersView
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.observe import NO_DRAIN_JOBS, ledger_place
from kvtier_operator.errors import ApiConflict, ApiNotFound, ForeignLedger, ForeignObject
from kvtier_operator.kinds import CLUSTER_KIND, CONFIG_MAP_KIND, KINDS, POD_KIND, Kind
from kvtier_operator.labels import APPLIED_HASH, DRAIN_JOB, DRAIN_SINCE, FINALIZER
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest, ObjectRef, observed_object
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

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scene:
    """One pass.

    Attributes:
        cluster: that it is about.
        view: the masters' newest answers.
        now: seconds since the epoch.
    """

    cluster: KVCacheCluster
    view: MastersView
    now: float

    @property
    def key(self) -> ClusterKey:
        """Of the cluster."""
        return ClusterKey(self.cluster.metadata.namespace, self.cluster.name)


@dataclass(slots=True)
class Executor:
    """Carries out actions.

    Args:
        api: the Kubernetes API.
        index: gets what the server answers.
        fence: asked before every write.
        admin: asks masters.
        events: writes events.
        metrics: counts.
        operator_namespace: has the ledger of the host network.
        seen_foreign: told of objects of others that have names of ours.
    """

    api: Cluster
    index: Index
    fence: Fence
    admin: MasterAdmin
    events: Events
    metrics: OperatorMetrics
    operator_namespace: str
    seen_foreign: Callable[[ClusterKey, ObjectRef, Manifest], None]

    async def carry_out(self, action: Action, scene: Scene) -> None:
        """Do one thing.

        Raises:
            NotLeader: nothing was written.
            ForeignObject: the object belongs to somebody else.
            ApiError: the server refused or did not answer.
            MasterSilent: the leading master did not answer.
        """
        steps: dict[type, Callable[[Any, Scene], Awaitable[None]]] = {
            Apply: self._apply,
            Scale: self._scale,
            Delete: self._delete,
            DeletePod: self._delete_pod,
            LabelPod: self._label_pod,
            SaveLedger: self._save_ledger,
            StartDrain: self._start_drain,
            CancelDrain: self._cancel_drain,
            SetFinalizer: self._set_finalizer,
            Emit: self._emit,
        }
        async with self._fenced():
            await steps[type(action)](action, scene)
        self.metrics.actions.labels(type(action).__name__).inc()

    async def save_status(self, scene_key: ClusterKey, uid: str, status: Mapping[str, Any]) -> Manifest:
        """Write the whole status; returns the object as it then stands."""
        meta = {"namespace": scene_key.namespace, "name": scene_key.name, "uid": uid}
        manifest = {"apiVersion": CLUSTER_KIND.api, "kind": CLUSTER_KIND.name, "metadata": meta, "status": status}
        async with self._fenced():
            written = await self.api.apply_status(manifest)
        self._learn(CLUSTER_KIND, written)
        self.metrics.status_writes.inc()
        return written

    async def _apply(self, action: Apply, scene: Scene) -> None:
        manifest, key = action.manifest, scene.key
        kind = KINDS[manifest["kind"]]
        known = self.index.find(key.namespace, action.ref)
        live = known.live() if known else await self.api.get(kind, key.namespace, action.ref.name)
        if live is not None:
            owner = observed_object(action.ref, live).owner_uid
            if owner != scene.cluster.metadata.uid:
                self.seen_foreign(key, action.ref, live)
                raise ForeignObject(f"{action.ref} belongs to {owner or 'nobody'}: rename the cluster or the object")
            manifest = manifest | {"metadata": manifest["metadata"] | {"uid": live["metadata"]["uid"]}}
        # Without force the apply fails if somebody made an object of this name since we looked.
        self._learn(kind, await self.api.apply(manifest, force=live is not None))
        self.metrics.applies.labels(kind.name).inc()
        if live is not None and _is_drift(action, known):
            self.metrics.drift_repaired.labels(kind.name).inc()
        self._say("applied", scene, action.ref, action.why)

    async def _scale(self, action: Scale, scene: Scene) -> None:
        patch = {"metadata": {"uid": action.uid}, "spec": {"replicas": action.replicas}}
        kind = KINDS[action.ref.kind]
        self._learn(kind, await self.api.merge(kind, scene.key.namespace, action.ref.name, patch))
        self._say("scaled", scene, action.ref, action.why, replicas=action.replicas)

    async def _delete(self, action: Delete, scene: Scene) -> None:
        await self._remove(KINDS[action.ref.kind], scene, action.ref, action.uid)
        self._say("deleted", scene, action.ref, action.why)

    async def _delete_pod(self, action: DeletePod, scene: Scene) -> None:
        ref = ObjectRef(POD_KIND.name, action.name)
        await self._remove(POD_KIND, scene, ref, action.uid)
        self._say("deleted", scene, ref, action.why)

    async def _label_pod(self, action: LabelPod, scene: Scene) -> None:
        await self._patch_pod(scene, action.name, action.uid, {"labels": dict(action.labels)})
        self._say("labelled", scene, ObjectRef(POD_KIND.name, action.name), action.why)

    async def _save_ledger(self, action: SaveLedger, scene: Scene) -> None:
        namespace, name = place = ledger_place(scene.cluster, self.operator_namespace)
        manifest = ledger_manifest(scene.cluster, action.ledger, place)
        if action.ledger.resource_version:
            written = await self.api.replace(CONFIG_MAP_KIND, namespace, name, manifest)
        else:
            try:
                written = await self.api.create(CONFIG_MAP_KIND, namespace, manifest)
            except ApiConflict:
                await self._find_ledger(scene, place, manifest["metadata"]["labels"])
                raise  # planned without knowing it
        self._learn(CONFIG_MAP_KIND, written)
        self._say("saved", scene, ObjectRef(CONFIG_MAP_KIND.name, name), "port blocks changed")

    async def _find_ledger(self, scene: Scene, place: tuple[str, str], labels: Mapping[str, str]) -> None:
        """One exists that no watch shows. If it is ours, its labels were taken away."""
        namespace, name = place
        live = await self.api.get(CONFIG_MAP_KIND, namespace, name)
        if live is None:
            return
        if not is_ledger(scene.cluster, live):
            raise ForeignLedger(f"ConfigMap {namespace}/{name} is not ours: delete it, or rename it or the cluster")
        patch = {"metadata": {"uid": live["metadata"]["uid"], "labels": labels}}
        self._learn(CONFIG_MAP_KIND, await self.api.merge(CONFIG_MAP_KIND, namespace, name, patch))

    async def _start_drain(self, action: StartDrain, scene: Scene) -> None:
        segment = scene.view.segments.get(action.pod, action.segment)
        try:
            job = await self.admin.start_drain(_leader(scene), segment)
        except DrainUnsupported:
            job = NO_DRAIN_JOBS
        remembered = {DRAIN_JOB: job, DRAIN_SINCE: timestamp(scene.now)}
        await self._patch_pod(scene, action.pod, action.uid, {"annotations": remembered})
        self._say("drain started", scene, ObjectRef(POD_KIND.name, action.pod), segment, job=job)

    async def _cancel_drain(self, action: CancelDrain, scene: Scene) -> None:
        if action.job and action.job != NO_DRAIN_JOBS and not await self.admin.cancel_drain(_leader(scene), action.job):
            return  # a later pass asks again, or finds that the node has nothing left
        await self._patch_pod(scene, action.pod, action.uid, {"annotations": {DRAIN_JOB: None, DRAIN_SINCE: None}})
        self._say("drain ended", scene, ObjectRef(POD_KIND.name, action.pod), "it is not wanted any more")

    async def release(self, key: ClusterKey) -> None:
        """Take our finalizer away from an object of which nothing is known but that it is to go.

        Raises:
            NotLeader: nothing was written.
            ApiError: the server refused or did not answer.
        """
        async with self._fenced():
            await self._hold(key, present=False)

    async def _set_finalizer(self, action: SetFinalizer, scene: Scene) -> None:
        await self._hold(scene.key, present=action.present)

    async def _hold(self, key: ClusterKey, *, present: bool) -> None:
        live = await self.api.get(CLUSTER_KIND, key.namespace, key.name)
        if live is None:
            return
        held = list(live["metadata"].get("finalizers") or ())
        wanted = [*held, FINALIZER] if present else [name for name in held if name != FINALIZER]
        if (FINALIZER in held) is present:
            return
        meta = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        patch = {"metadata": meta | {"finalizers": wanted}}
        self._learn(CLUSTER_KIND, await self.api.merge(CLUSTER_KIND, key.namespace, key.name, patch))
        what = "finalizer set" if present else "finalizer removed"
        event(_LOG, what, cluster=key, object=ObjectRef(CLUSTER_KIND.name, key.name))

    async def _emit(self, action: Emit, scene: Scene) -> None:
        if await self.events.emit(scene.key, scene.cluster.metadata.uid, action):
            self.metrics.events.labels(action.reason).inc()

    async def _patch_pod(self, scene: Scene, name: str, uid: str, meta: Mapping[str, Any]) -> None:
        patch = {"metadata": {"uid": uid, **meta}}
        self._learn(POD_KIND, await self.api.merge(POD_KIND, scene.key.namespace, name, patch))

    async def _remove(self, kind: Kind, scene: Scene, ref: ObjectRef, uid: str) -> None:
        try:
            rest = await self.api.delete(kind, scene.key.namespace, ref.name, uid)
        except (ApiNotFound, ApiConflict):
            rest = None  # it is gone, or another object has its name by now
        if rest is None:
            self.index.remove(scene.key.namespace, ref, uid)
        else:
            self._learn(kind, rest)

    @asynccontextmanager
    async def _fenced(self) -> AsyncIterator[None]:
        """Begin only while we lead, and end before another one may."""
        self.fence.check()
        remaining = self.fence.remaining_s()
        async with asyncio.timeout(None if math.isinf(remaining) else max(0.0, remaining)):
            yield

    def _learn(self, kind: Kind, body: Manifest) -> None:
        self.index.put(record_of(kind.name, body))

    def _say(self, what: str, scene: Scene, ref: ObjectRef, why: str, **more: Any) -> None:
        event(_LOG, what, cluster=scene.key, object=ref, why=why, **more)


def _is_drift(action: Apply, known: Record | None) -> bool:
    """The live object bears the hash of this very intent, and yet it had to be applied."""
    if known is None:
        return True  # its labels were taken away, else the index would know it
    wanted: str = action.manifest["metadata"].get("annotations", {}).get(APPLIED_HASH, "")
    return observed_object(action.ref, known.live()).applied_hash == wanted


def _leader(scene: Scene) -> AdminAddress:
    if scene.view.leader is None:
        raise MasterSilent("no master leads now")
    return scene.view.leader
