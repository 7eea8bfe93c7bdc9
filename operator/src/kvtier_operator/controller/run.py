"""Puts the operator together and keeps its tasks running until it is told to stop. IO; called by `main`.

informer thread ──records──▶ index ──keys──▶ queue ──▶ workers (only while we lead): observe → plan → apply → status
relist ─────────repairs────▶ index               ▲
master poller ──────────changed answers──────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus

from kvtier_operator.api import KIND
from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.apply import Executor
from kvtier_operator.controller.credentials import login
from kvtier_operator.controller.events import Events
from kvtier_operator.controller.foreign import ForeignObjects
from kvtier_operator.controller.health import LONGEST_LAG_S, LONGEST_SILENCE_S, Heart, HttpPorts
from kvtier_operator.controller.index import ClusterKey, Index
from kvtier_operator.controller.kube_client import KubeClient, Request
from kvtier_operator.controller.leadership import Fence, Leadership, OpenFence
from kvtier_operator.controller.loop import Controller, Policy
from kvtier_operator.controller.masters import MasterAdmin
from kvtier_operator.controller.masters_client import HttpMasterAdmin
from kvtier_operator.controller.masters_poll import MasterPoller
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.options import Options
from kvtier_operator.controller.watching import Watching
from kvtier_operator.kinds import CLUSTER_KIND, OPTIONAL_KINDS
from kvtier_operator.labels import MANAGER
from kvtier_operator.log import event
from kvtier_operator.observed import Manifest
from kvtier_operator.webhook.run import Webhook, WebhookOptions, make_webhook

_LOG = logging.getLogger(__name__)

_MAY_GO = frozenset(kind.plural for kind in (CLUSTER_KIND, *OPTIONAL_KINDS))
"""Kinds that the API server has only while their definitions are there."""


@dataclass(slots=True)
class Part:
    """Whether this operator leads, as events to wait for."""

    leading: asyncio.Event = field(default_factory=asyncio.Event)
    standing_by: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.standing_by.set()

    def changed(self, leads: bool) -> None:
        """Take note."""
        event(_LOG, "leading" if leads else "standing by")
        now, before = (self.leading, self.standing_by) if leads else (self.standing_by, self.leading)
        before.clear()
        now.set()


class Operator:
    """One operator process.

    Args:
        options: of the command line.
        policy: decides.
        api: the Kubernetes API.
        admin: asks masters.
        metrics: counts.
    """

    def __init__(
        self, options: Options, policy: Policy, api: Cluster, admin: MasterAdmin, metrics: OperatorMetrics
    ) -> None:
        self._part = Part()
        self._heart = Heart()
        self._index = Index()
        self._election: Leadership | None = None
        fence: Fence = OpenFence()
        if options.leader_election:
            place = (options.operator_namespace, MANAGER)
            fence = self._election = Leadership(api, place, options.identity, self._part.changed)
        self._poller = MasterPoller(admin, self._wake)
        foreign = ForeignObjects(api)
        executor = Executor(
            api=api,
            index=self._index,
            fence=fence,
            admin=admin,
            events=Events(api, options.identity),
            metrics=metrics,
            operator_namespace=options.operator_namespace,
            seen_foreign=foreign.seen,
        )
        self._controller = Controller(
            policy=policy,
            index=self._index,
            executor=executor,
            poller=self._poller,
            foreign=foreign,
            metrics=metrics,
            operator_namespace=options.operator_namespace,
            workers=options.workers,
            mine=lambda namespace: not options.namespaces or namespace in options.namespaces,
        )
        # The ledger of the host network lies in the operator's own namespace.
        watched = (*options.namespaces, options.operator_namespace) if options.namespaces else ()
        self._watching = Watching(
            api, self._index, tuple(dict.fromkeys(watched)), self._wake, self._optional_kinds, metrics
        )
        self._read_for(metrics)

    def disturbed(self) -> None:
        """The API server did not answer."""
        self._watching.disturbed()

    def problem(self) -> str:
        """What is wrong with this process so that only a restart helps; empty = nothing."""
        if (lag := self._heart.late_s()) > LONGEST_LAG_S:
            return f"the event loop is {lag:.0f} s late"
        if (silence := self._watching.silence_s()) > LONGEST_SILENCE_S:
            return f"the watches have been silent for {silence:.0f} s"
        return ""

    def waits_for(self) -> str:
        """What has to be there before this operator is of use; empty = nothing."""
        return self._watching.waits_for

    def clusters(self) -> Iterator[Manifest]:
        """Every KVCacheCluster that is known."""
        return (record.live() for record in self._index.everything(KIND))

    async def run(self) -> None:
        """Work until cancelled; release the lease then."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heart.run())
            group.create_task(self._watching.run())
            group.create_task(self._act())
            if self._election is None:
                self._part.changed(leads=True)
            else:
                group.create_task(self._election.run())

    async def _act(self) -> None:
        """Run workers and poll masters whenever we lead."""
        await self._watching.warm.wait()
        while True:
            await self._part.leading.wait()
            self._controller.wake_all()
            tasks = [asyncio.create_task(self._controller.run()), asyncio.create_task(self._poller.run())]
            lost = asyncio.create_task(self._part.standing_by.wait())
            try:
                done, _ = await asyncio.wait((*tasks, lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*tasks, lost):
                    task.cancel()
                await asyncio.gather(*tasks, lost, return_exceptions=True)
            self._poller.forget_all()
            for task in done - {lost}:
                task.result()  # neither ends by itself: its error ends the process

    def _wake(self, key: ClusterKey) -> None:
        self._controller.wake(key)

    def _optional_kinds(self, kinds: frozenset[str]) -> None:
        if kinds != self._controller.optional_kinds:
            self._controller.optional_kinds = kinds
            self._controller.wake_all()

    def _read_for(self, metrics: OperatorMetrics) -> None:
        queue, readings = self._controller.queue, metrics.readings
        readings.queue_depth = lambda: queue.depth(self._controller.clock())
        readings.queue_age_s = lambda: queue.oldest_age_s(self._controller.clock())
        readings.clusters = lambda: len(self._index.clusters())
        readings.watch_silence_s = self._watching.silence_s
        readings.loop_lag_s = self._heart.late_s
        readings.leading = lambda: float(self._part.leading.is_set())


async def run_operator(options: Options, policy: Policy, stop: asyncio.Event) -> None:
    """Run an operator until ``stop`` is set.

    Raises:
        MachineError: there are no credentials, or a port cannot be listened on.
    """
    metrics = OperatorMetrics()

    def count(request: Request) -> None:
        metrics.api_requests.labels(request.verb, request.resource, str(request.code)).inc()
        if is_disturbing(request):
            operator.disturbed()

    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(KubeClient(login, count))
        admin = await stack.enter_async_context(HttpMasterAdmin())
        operator = Operator(options, policy, api, admin, metrics)
        door = _door(options, operator, api)
        ports = HttpPorts(
            host=options.host,
            metrics_port=options.metrics_port,
            liveness_port=options.liveness_port,
            registry=metrics.registry,
            alive=operator.problem,
            ready=lambda: operator.waits_for() or ("" if door is None else door.waits_for),
        )
        await stack.enter_async_context(ports)
        event(_LOG, "starting", identity=options.identity, namespaces=",".join(options.namespaces) or "all")
        await _until(stop, asyncio.create_task(_work(operator, door)))
        event(_LOG, "stopped")


def is_disturbing(request: Request) -> bool:
    """True when the answer, or its absence, says that what we know of the server may not hold any more."""
    if request.code == HTTPStatus.NOT_FOUND:
        # An apply makes what is absent, unless the kind itself is.
        return request.verb == "patch" and request.resource in _MAY_GO
    return request.code == 0 or request.code >= HTTPStatus.INTERNAL_SERVER_ERROR


def _door(options: Options, operator: Operator, api: Cluster) -> Webhook | None:
    """The admission webhook, which every replica serves, whether it leads or not."""
    if not options.webhook_port:
        return None
    where = WebhookOptions(options.webhook_port, options.webhook_host, options.operator_namespace, options.webhook_url)
    return make_webhook(where, operator.clusters, api)


async def _work(operator: Operator, door: Webhook | None) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(operator.run())
        if door is not None:
            group.create_task(door.run())


async def _until(stop: asyncio.Event, work: asyncio.Task[None]) -> None:
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    ended_by_itself = work.done()
    work.cancel()
    if ended_by_itself:
        work.result()
    with suppress(asyncio.CancelledError):
        await work
