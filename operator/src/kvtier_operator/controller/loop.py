"""The level-based loop: take a cluster from the queue, observe, plan, carry the plan out, write the status. IO.

A pass starts from nothing but what the index holds, and leaves nothing behind but what it wrote: it may be cut off
anywhere. Passes of different clusters run side by side, those of one cluster never do. Workers run while this operator
leads; a standby only keeps its index warm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.controller.apply import Executor, Scene
from kvtier_operator.controller.foreign import ForeignObjects
from kvtier_operator.controller.index import ClusterKey, Index, Record
from kvtier_operator.controller.masters import MasterSilent
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.observe import Surroundings, observe, poll_targets
from kvtier_operator.controller.pace import Pace
from kvtier_operator.controller.status_writer import StatusWriter
from kvtier_operator.controller.work_queue import WorkQueue
from kvtier_operator.errors import (
    ApiConflict,
    ApiDenied,
    ApiError,
    ApiInvalid,
    ApiNotFound,
    ApiUnavailable,
    ForeignLedger,
    ForeignObject,
    LedgerError,
    NamespaceEnding,
    NotLeader,
    SpecError,
)
from kvtier_operator.labels import FINALIZER
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest, Observed
from kvtier_operator.planning.actions import Emit, Plan
from kvtier_operator.spec_rules import accept
from kvtier_operator.status import hindered_status, refused_status

LEDGER_S = 15.0
"""Between two looks at a ledger that is damaged or not ours."""
PASS_TIMEOUT_S = 60.0
NAMESPACE_S = 5.0
"""After which a cluster in a namespace that is being deleted is looked at again."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """The pure decisions, which the controller only carries out.

    Attributes:
        reconcile: the plan for what is observed.
        refuse: status of an object that is not valid, or whose ports are not known: the object, what is wrong, now.
    """

    reconcile: Callable[[KVCacheCluster, Observed], Plan]
    refuse: Callable[[Manifest, SpecError | LedgerError, float], Mapping[str, Any]]


@dataclass(slots=True)
class Controller:
    """Keeps every cluster as its spec says.

    Args:
        policy: decides.
        index: what the API server has.
        executor: carries actions out.
        poller: asks masters.
        foreign: objects of others that are in the way.
        metrics: counts.
        operator_namespace: has the ledger of the host network.
        workers: passes at once.
        mine: whether a namespace is to be served.
        optional_kinds: that the API server has.
        clock: monotonic seconds.
        wall: seconds since the epoch.
        chance: source of jitter.
    """

    policy: Policy
    index: Index
    executor: Executor
    poller: MasterPoller
    foreign: ForeignObjects
    metrics: OperatorMetrics
    operator_namespace: str
    workers: int = 4
    mine: Callable[[str], bool] = lambda _namespace: True
    optional_kinds: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    chance: Random = field(default_factory=Random)
    queue: WorkQueue[ClusterKey] = field(init=False)
    _statuses: StatusWriter = field(init=False)
    _pace: Pace[ClusterKey] = field(init=False)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.queue = WorkQueue(self.chance)
        self._pace = Pace(self.chance)
        self._statuses = StatusWriter(self.executor)

    def wake(self, key: ClusterKey) -> None:
        """Something of this cluster changed."""
        if key.name and self.mine(key.namespace):
            self.queue.add(key, self.clock())
            self._stirred.set()

    def wake_all(self) -> None:
        """Look at every cluster."""
        for key in self.index.clusters():
            self.wake(key)

    async def run(self) -> None:
        """Work until cancelled."""
        slots = asyncio.Semaphore(self.workers)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                key = await self._next()
                group.create_task(self._work(key, slots))

    async def _next(self) -> ClusterKey:
        while True:
            self._stirred.clear()
            key = self.queue.take(self.clock())
            if key is not None:
                return key
            due = self.queue.next_due()
            delay = None if due is None else max(0.0, due - self.clock())
            try:
                async with asyncio.timeout(delay):
                    await self._stirred.wait()
            except TimeoutError:
                continue

    async def _work(self, key: ClusterKey, slots: asyncio.Semaphore) -> None:
        started, outcome = self.clock(), "error"
        try:
            async with asyncio.timeout(PASS_TIMEOUT_S):
                outcome, again_s = await self.look_after(key)
            self.queue.done(key)
            if again_s:
                self.queue.add(key, self.clock() + again_s)
        except (NotLeader, asyncio.CancelledError) as error:
            # Whoever leads next, maybe we ourselves, begins anew.
            outcome = "interrupted"
            self.queue.failed(key, self.clock())
            if isinstance(error, asyncio.CancelledError):
                raise
        except ApiConflict as error:
            outcome = "conflict"
            event(_LOG, "conflict", level=logging.INFO, cluster=key, error=error)
            self.queue.failed(key, self.clock())
        except NamespaceEnding:
            # The cluster is about to go too; its children have only gone first.
            outcome = "gone"
            self.queue.failed(key, self.clock(), NAMESPACE_S)
        except (ApiError, MasterSilent, TimeoutError) as error:
            wait_s = self.queue.failed(key, self.clock(), getattr(error, "retry_after_s", 0.0))
            what = str(error) or "the pass took too long"
            event(_LOG, "pass failed", level=logging.WARNING, cluster=key, error=what, again_in_s=wait_s)
        except Exception:  # noqa: BLE001 - the top of a pass: one cluster's trouble must not end the others
            _LOG.exception("pass over %s failed", key)
            self.queue.failed(key, self.clock())
        finally:
            slots.release()
            self._stirred.set()
            self.metrics.reconcile_s.labels(outcome).observe(self.clock() - started)

    async def look_after(self, key: ClusterKey) -> tuple[str, float]:
        """One pass.

        Returns:
            What came of it, and after how many seconds to look again without any event; 0 = never.
        """
        record = self.index.cluster(key)
        if record is None:
            self._forget(key)
            return "gone", 0.0
        body = record.live()
        try:
            cluster = accept(body)
        except SpecError as error:
            if _waits_for_us(body):
                # The order of its end cannot be told; the garbage collector takes everything at once.
                await self.executor.release(key)
                return "changed", 0.0
            return await self._refuse(key, body, error)
        self.poller.watch(key, poll_targets(cluster, self.index))
        await self.foreign.check(key)
        around = Surroundings(self.poller.view(key), self.foreign.of(key), self.optional_kinds, self.wall())
        try:
            observed = observe(cluster, self.index, self.operator_namespace, around)
        except LedgerError as error:
            return await self._refuse(key, body, error)
        plan = self.policy.reconcile(cluster, observed)
        scene = Scene(cluster, around.view, around.now)
        return await self._carry_out(plan, scene, record)

    async def _carry_out(self, plan: Plan, scene: Scene, record: Record) -> tuple[str, float]:
        try:
            for action in plan.actions:
                await self.executor.carry_out(action, scene)
        except ForeignLedger as error:
            await self._tell(scene, record, plan, str(error))
            return "conflict", LEDGER_S
        except ForeignObject as error:
            # The next pass sees the object, and its status says so.
            event(_LOG, "refused", level=logging.WARNING, cluster=scene.key, error=error)
            self.wake(scene.key)
            return "conflict", 0.0
        except ApiInvalid as error:
            return await self._stuck(scene, record, plan, error)
        except ApiDenied as error:
            await self._tell(scene, record, plan, f"{error}; raise the quota, or allow it to the operator's account")
            raise
        except (MasterSilent, ApiUnavailable) as error:
            # 500 is what somebody's broken webhook makes of our writes. The rest passes, or nothing can be written.
            if isinstance(error, MasterSilent) or error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                await self._save_status(scene.key, record.uid, hindered_status(plan.status, str(error)))
            raise
        wrote = await self._save_status(scene.key, record.uid, plan.status)
        acted = any(not isinstance(action, Emit) for action in plan.actions)
        again_s = self._pace.next_s(scene.key, acted=acted, news=wrote, asked_s=plan.requeue_after_s)
        return "changed" if plan.actions or wrote else "unchanged", again_s

    async def _stuck(self, scene: Scene, record: Record, plan: Plan, error: ApiInvalid) -> tuple[str, float]:
        """The server will not accept what we want: say so, and try again when something changes."""
        fix = "delete the object by hand after checking what depends on it" if error.immutable else "change the spec"
        message = f"{error}; {fix}"
        event(_LOG, "refused", level=logging.WARNING, cluster=scene.key, error=message)
        await self._tell(scene, record, plan, message)
        return "error", self._pace.resync_s()

    async def _tell(self, scene: Scene, record: Record, plan: Plan, message: str) -> None:
        """Say in event and status what the server refuses."""
        await self.executor.carry_out(Emit("ApplyRefused", message, warning=True), scene)
        status = refused_status(plan.status, record.live().get("status") or {}, message, self.wall())
        await self._save_status(scene.key, record.uid, status)

    async def _refuse(self, key: ClusterKey, body: Manifest, error: SpecError | LedgerError) -> tuple[str, float]:
        event(_LOG, "invalid", level=logging.WARNING, cluster=key, error=error)
        await self._save_status(key, body["metadata"]["uid"], self.policy.refuse(body, error, self.wall()))
        # The shared ledger is no cluster's own: nobody is woken when it is mended.
        return "invalid", self._pace.resync_s() if isinstance(error, SpecError) else LEDGER_S

    async def _save_status(self, key: ClusterKey, uid: str, status: Mapping[str, Any]) -> bool:
        self.metrics.conditions.set(key, status)
        record = self.index.cluster(key)
        if record is None or record.uid != uid:
            return False  # deleted meanwhile
        try:
            wrote = await self._statuses.save(key, record, status)
        except ApiNotFound:
            return False
        now = self.index.cluster(key)
        if wrote and now is not None and _all_but_status(now) != _all_but_status(record):
            # The answer brought a change of the spec along, and the watch will show nothing newer.
            self.wake(key)
        return wrote

    def _forget(self, key: ClusterKey) -> None:
        self.queue.forget(key)
        self._pace.forget(key)
        self.poller.forget(key)
        self.foreign.forget(key)
        self._statuses.forget(key)
        self.metrics.conditions.forget(key)


def _waits_for_us(body: Manifest) -> bool:
    """The object is to go, and only our finalizer, which a pause would keep, may still hold it."""
    meta, spec = body["metadata"], body.get("spec")
    paused = isinstance(spec, dict) and spec.get("paused") is True
    return bool(meta.get("deletionTimestamp")) and FINALIZER in (meta.get("finalizers") or ()) and not paused


def _all_but_status(record: Record) -> Manifest:
    return {name: value for name, value in record.live().items() if name != "status"}
