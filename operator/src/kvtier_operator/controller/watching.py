"""Keeps the index true: waits for our definition, runs the informer, compares with lists, starts watches anew. IO."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.index import ClusterKey, Index, Record
from kvtier_operator.controller.informer import Deliver, Informer, Seen
from kvtier_operator.controller.metrics import OperatorMetrics
from kvtier_operator.controller.relist import Relist
from kvtier_operator.errors import ApiError
from kvtier_operator.kinds import CHILD_KINDS, CLUSTER_KIND, OPTIONAL_KINDS, POD_KIND, Kind
from kvtier_operator.log import event

RELIST_S = 300.0
_POLL_S = 2.0
_WARM_POLL_S = 0.2
_WARM_POLLS = 100
"""So often the index is looked at while the first lists of the watches come in; then what is missing is read."""
_LIST_AFTER_POLLS = 10
_DOUBT_S = 1.0
_LONGEST_DOUBT_S = 60.0
_GRACE_S = 5.0
"""By how much a list may be ahead of a watch that works."""

_LOG = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

NO_DEFINITION = "KVCacheCluster is not defined in this cluster: kubectl apply -f crds/"


class Watches(Protocol):
    """What `Informer` is to this module."""

    def start(self) -> None:
        """Watch from now on."""

    def stop(self) -> None:
        """End the watches."""

    def silence_s(self) -> float:
        """Seconds since the watches' event loop last turned."""


@dataclass(slots=True)
class Watching:
    """The watches and what keeps them honest. `run` is a task.

    Args:
        api: the Kubernetes API.
        index: is kept true.
        namespaces: to watch; empty = all.
        wake: told of every cluster that has to be looked at.
        optional: told which of the optional kinds exist, whenever that changes.
        metrics: counts.
        informer: makes the watches.
        pause: waits some seconds.
    """

    api: Cluster
    index: Index
    namespaces: Collection[str]
    wake: Callable[[ClusterKey], None]
    optional: Callable[[frozenset[str]], None]
    metrics: OperatorMetrics
    informer: Callable[[Sequence[Kind], Collection[str], Deliver, Callable[[], None]], Watches] = Informer
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    warm: asyncio.Event = field(default_factory=asyncio.Event)
    waits_for: str = "the Kubernetes API"
    _doubt: asyncio.Event = field(default_factory=asyncio.Event)
    _soon_s: float = _DOUBT_S
    _kinds: tuple[Kind, ...] = ()
    _informer: Watches | None = None
    _chance: Random = field(default_factory=Random)

    def disturbed(self) -> None:
        """The server did not answer, a kind or a watch has gone: what happened meanwhile may never be shown."""
        self._doubt.set()

    def silence_s(self) -> float:
        """Seconds since the watches last showed a sign of life."""
        return 0.0 if self._informer is None else self._informer.silence_s()

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            await self._until_defined()
            self._kinds = await self._patiently(self._existing_kinds)
            self._start()
            await self._warm_up()
            troubled = False
            while True:
                await self._until_next()
                try:
                    await self._check()
                    troubled = False
                except ApiError as error:
                    if not troubled:
                        event(_LOG, "cannot compare with lists", level=logging.WARNING, error=error)
                    troubled = True
                    self.disturbed()
        finally:
            await self._stop()

    async def _until_next(self) -> None:
        """Until the next comparison is due: every five minutes, or soon when there is doubt."""
        rest = asyncio.ensure_future(self.pause(RELIST_S * (0.9 + 0.2 * self._chance.random())))
        doubt = asyncio.create_task(self._doubt.wait())
        try:
            await asyncio.wait((rest, doubt), return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
            doubt.cancel()
        if not self._doubt.is_set():
            self._soon_s = _DOUBT_S
            return
        await self.pause(self._soon_s)
        # A server that has trouble with everybody's requests must not get ever more lists from us.
        self._soon_s = min(_LONGEST_DOUBT_S, 2 * self._soon_s)
        self._doubt.clear()

    async def _until_defined(self) -> None:
        said = ""
        while True:
            try:
                problem = "" if await self.api.serves(CLUSTER_KIND) else NO_DEFINITION
            except ApiError as error:
                problem = str(error)
            if not problem:
                return
            self.waits_for = problem
            if problem != said:
                event(_LOG, "waiting", level=logging.WARNING, why=problem)
                said = problem
            await self.pause(_POLL_S)

    async def _existing_kinds(self) -> tuple[Kind, ...]:
        optional = [kind for kind in OPTIONAL_KINDS if await self.api.serves(kind)]
        self.optional(frozenset(kind.name for kind in optional))
        return (CLUSTER_KIND, *CHILD_KINDS, POD_KIND, *optional)

    async def _warm_up(self) -> None:
        """Until the index has everything that the server had when we began."""
        self.waits_for = "the first lists"
        relist = self._relist()
        stale = await self._patiently(lambda: relist.missing(self._kinds))
        for poll in range(1, _WARM_POLLS + 1):
            if not stale:
                break
            await self.pause(_WARM_POLL_S)
            stale = relist.still_missing(stale)
            if stale and poll % _LIST_AFTER_POLLS == 0:
                # What was deleted since the list will never be shown.
                stale = await self._patiently(lambda: relist.missing(self._kinds))
        await self._patiently(lambda: relist.repair(stale))
        event(_LOG, "watching", clusters=len(self.index.clusters()), kinds=len(self._kinds))
        self.waits_for = ""
        self.warm.set()

    async def _check(self) -> None:
        if not await self.api.serves(CLUSTER_KIND):
            await self._until_defined()
            self.waits_for = ""
            await self._restart("the definition has come back")
        kinds = await self._existing_kinds()
        if kinds != self._kinds:
            # Before the lists: one of a kind that exists no more cannot be had.
            self._kinds = kinds
            await self._restart("other kinds exist now")
        relist = self._relist()
        stale = await relist.missing(self._kinds)
        if stale:
            await self.pause(_GRACE_S)
            if await relist.repair(stale):
                await self._restart("they had missed objects")

    async def _patiently(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        while True:
            try:
                return await call()
            except ApiError as error:
                self.waits_for = str(error)
                event(_LOG, "waiting", level=logging.WARNING, why=error)
                await self.pause(max(_POLL_S, error.retry_after_s))

    def _relist(self) -> Relist:
        return Relist(self.api, self.index, self.namespaces, self.wake, self._count_repair)

    def _count_repair(self, kind: str) -> None:
        self.metrics.strays.labels(kind).inc()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(record: Record, seen: Seen) -> None:
            loop.call_soon_threadsafe(self._take, record, seen)

        def restarted() -> None:
            self.metrics.informer_restarts.inc()
            loop.call_soon_threadsafe(self.disturbed)

        self._informer = self.informer(self._kinds, self.namespaces, deliver, restarted)
        self._informer.start()

    def _take(self, record: Record, seen: Seen) -> None:
        if seen is Seen.GONE:
            woken = self.index.remove(record.home.namespace, record.ref, record.uid)
        else:
            woken = self.index.put(record)
        if seen is Seen.LISTED and self.warm.is_set():
            self.disturbed()
        for key in woken:
            self.wake(key)

    async def _restart(self, why: str) -> None:
        event(_LOG, "watches started anew", level=logging.WARNING, why=why)
        self.metrics.informer_restarts.inc()
        await self._stop()
        self._start()

    async def _stop(self) -> None:
        if self._informer is not None:
            await asyncio.shield(asyncio.to_thread(self._informer.stop))
