"""Asks the masters of all clusters how they are, beside the reconcile passes and never within one. IO.

A pass says which pods to ask (`watch`) and reads the newest answers (`view`); when they change, its cluster is woken.
At most `_AT_ONCE` clusters are asked at a time, each every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtier_operator.controller.index import ClusterKey
from kvtier_operator.controller.masters import (
    AdminAddress,
    DrainProgress,
    Health,
    MasterAdmin,
    MasterSilent,
    MastersView,
    Targets,
)
from kvtier_operator.observed import DrainPhase, MasterRole, MasterState

_LOG = logging.getLogger(__name__)

SETTLED_S = 5.0
UNSETTLED_S = 1.0
_TICK_S = 0.25
_AT_ONCE = 32
_LAG_LIMIT = 100
"""Entries of the log that a standby may lag behind and still count as caught up: a fraction of a second of writes."""

_EMPTY = MastersView()


@dataclass(slots=True)
class MasterPoller:
    """Answers of all clusters' masters. `run` is a task.

    Args:
        admin: asks one master.
        changed: told of each cluster whose answers changed.
        clock: monotonic seconds.
    """

    admin: MasterAdmin
    changed: Callable[[ClusterKey], None]
    clock: Callable[[], float] = time.monotonic
    _targets: dict[ClusterKey, Targets] = field(default_factory=dict)
    _views: dict[ClusterKey, MastersView] = field(default_factory=dict)
    _due: dict[ClusterKey, float] = field(default_factory=dict)
    _asking: set[ClusterKey] = field(default_factory=set)

    def watch(self, key: ClusterKey, targets: Targets) -> None:
        """Ask these from now on; new ones at once."""
        if not targets.masters:
            self.forget(key)
        elif self._targets.get(key) != targets:
            self._targets[key] = targets
            self._due[key] = self.clock()

    def view(self, key: ClusterKey) -> MastersView:
        """The newest answers."""
        return self._views.get(key, _EMPTY)

    def forget(self, key: ClusterKey) -> None:
        """Ask no more."""
        for known in (self._targets, self._views, self._due):
            known.pop(key, None)

    def forget_all(self) -> None:
        """Ask nobody: another operator leads."""
        for known in (self._targets, self._views, self._due):
            known.clear()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                now = self.clock()
                for key in [key for key, due in self._due.items() if due <= now and key not in self._asking]:
                    if len(self._asking) >= _AT_ONCE:
                        break
                    self._asking.add(key)
                    group.create_task(self._ask_cluster(key))
                await asyncio.sleep(_TICK_S)

    async def _ask_cluster(self, key: ClusterKey) -> None:
        try:
            targets = self._targets[key]
            view = await self.ask(targets)
            if key not in self._targets:
                return  # forgotten meanwhile
            settled = view.leader is not None and not targets.jobs
            if self._targets[key] is targets:
                self._due[key] = self.clock() + (SETTLED_S if settled else UNSETTLED_S)
            if view != self._views.get(key, _EMPTY):
                self._views[key] = view
                self.changed(key)
        except Exception:  # noqa: BLE001 - one odd answer must not end the polling of every cluster
            _LOG.exception("asking the masters of %s failed", key)
            if key in self._targets:
                self._due[key] = self.clock() + SETTLED_S
            if self._views.pop(key, _EMPTY) != _EMPTY:
                # Nobody may be replaced because of what was true once.
                self.changed(key)
        finally:
            self._asking.discard(key)

    async def ask(self, targets: Targets) -> MastersView:
        """One round over the masters of a cluster."""
        answers = await asyncio.gather(*(self._health(address) for address in targets.masters.values()))
        known = {pod: answer for pod, answer in zip(targets.masters, answers, strict=True) if answer is not None}
        masters = {pod: _state(pod, health) for pod, health in known.items()}
        # Of two that both say so, e.g. a leader that has not noticed its successor, the later election counts.
        leaders = sorted((health.view_version, pod) for pod, health in known.items() if health.serving)
        if not leaders:
            return MastersView(masters)
        leader = targets.masters[leaders[-1][1]]
        segments, drains = await asyncio.gather(self._segments(leader, targets), self._drains(leader, targets))
        return MastersView(masters, leader, segments, drains)

    async def _health(self, address: AdminAddress) -> Health | None:
        try:
            return await self.admin.health(address)
        except MasterSilent:
            return None

    async def _segments(self, leader: AdminAddress, targets: Targets) -> Mapping[str, str]:
        try:
            names = await self.admin.segments(leader)
        except MasterSilent:
            return {}
        found = {}
        for name in names:
            host = name.rpartition(":")[0]
            pod = targets.stores.get(host) or targets.stores.get(host.partition(".")[0])
            if pod is not None:
                found[pod] = name
        return found

    async def _drains(self, leader: AdminAddress, targets: Targets) -> Mapping[str, DrainProgress]:
        found = {}
        for job in sorted(targets.jobs):
            try:
                found[job] = await self.admin.drain_progress(leader, job)
            except MasterSilent as error:
                found[job] = DrainProgress(DrainPhase.RUNNING, f"no answer: {error}")
        return found


def _state(pod: str, health: Health) -> MasterState:
    return MasterState(
        pod=pod,
        role=health.role,
        serving=health.serving,
        address=health.leader,
        view_version=health.view_version,
        caught_up=health.role is MasterRole.STANDBY and health.lag is not None and health.lag <= _LAG_LIMIT,
    )
