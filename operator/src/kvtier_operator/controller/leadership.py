"""Holds the Lease for as long as it can, and says at any moment whether this operator may write. IO around `lease`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvtier_operator.cluster import Cluster
from kvtier_operator.controller.lease import (
    DURATION_S,
    RENEW_WITHIN_S,
    RETRY_S,
    Sighting,
    Step,
    decide,
    lease_manifest,
    read_lease,
)
from kvtier_operator.errors import ApiConflict, ApiError, NotLeader
from kvtier_operator.kinds import LEASE_KIND
from kvtier_operator.log import event

_LOG = logging.getLogger(__name__)

Clock = Callable[[], float]


def since_boot() -> float:
    """Monotonic seconds that go on while the machine sleeps: who wakes up must not think that it still leads."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class Fence(Protocol):
    """Stands before every write."""

    def check(self) -> None:
        """Raise `NotLeader` unless this operator may write now."""

    def remaining_s(self) -> float:
        """For how long a write that starts now may take at most."""


class OpenFence:
    """For an operator that runs alone."""

    def check(self) -> None:
        """Nobody else writes."""

    def remaining_s(self) -> float:
        """For ever."""
        return float("inf")


@dataclass(slots=True)
class Leadership:
    """One operator's part in the election. `run` is a task; the rest may be asked at any time.

    Args:
        cluster: the Kubernetes API.
        place: namespace and name of the Lease.
        identity: of this operator, unlike that of any other.
        changed: told whenever this operator becomes leader (True) or ceases to be.
        clock: monotonic seconds, those included during which the machine slept.
        wall: seconds since the epoch.
    """

    cluster: Cluster
    place: tuple[str, str]
    identity: str
    changed: Callable[[bool], None]
    clock: Clock = since_boot
    wall: Clock = time.time
    _sighting: Sighting = field(default_factory=lambda: Sighting(None, 0.0))
    _may_write_until: float = float("-inf")
    _leading: bool = False
    _problem: str = ""

    @property
    def leading(self) -> bool:
        """True while this operator may write."""
        return self.clock() < self._may_write_until

    def check(self) -> None:
        """See `Fence`."""
        if not self.leading:
            raise NotLeader("the lease is not ours")

    def remaining_s(self) -> float:
        """See `Fence`. A write that was sent in time is over before anybody else may take the Lease."""
        return self._may_write_until + (DURATION_S - RENEW_WITHIN_S) - self.clock()

    async def run(self) -> None:
        """Take part until cancelled; then release the Lease."""
        try:
            while True:
                await self.take_part()
                await asyncio.sleep(RETRY_S)
        finally:
            await self._release()

    async def take_part(self) -> None:
        """One look at the Lease and what follows from it. Never raises `ApiError`."""
        try:
            async with asyncio.timeout(RENEW_WITHIN_S / 2):
                await self._look_and_act()
            self._say("")
        except (ApiError, TimeoutError) as error:
            self._say(str(error) or "no answer in time")
        self._tell()

    def _say(self, problem: str) -> None:
        """Once at the beginning and once at the end of an outage."""
        if bool(problem) is bool(self._problem):
            return
        self._problem = problem
        if problem:
            event(_LOG, "cannot look after the lease", level=logging.WARNING, error=problem)
        else:
            event(_LOG, "the lease can be looked after again")

    async def _look_and_act(self) -> None:
        body = await self.cluster.get(LEASE_KIND, *self.place)
        lease = read_lease(body) if body is not None else None
        self._sighting = self._sighting.next(lease, self.clock())
        step = decide(self._sighting, self.identity, self.clock())
        if step is Step.WAIT:
            self._may_write_until = float("-inf")
            return
        sent_at = self.clock()
        manifest = lease_manifest(self.place, step, lease, self.identity, self.wall())
        try:
            if step is Step.CREATE:
                written = await self.cluster.create(LEASE_KIND, self.place[0], manifest)
            else:
                written = await self.cluster.replace(LEASE_KIND, *self.place, manifest)
        except ApiConflict:
            return  # somebody was faster; the next look says who
        self._sighting = self._sighting.next(read_lease(written), self.clock())
        self._may_write_until = sent_at + RENEW_WITHIN_S

    def _tell(self) -> None:
        if self.leading is not self._leading:
            self._leading = not self._leading
            self.changed(self._leading)

    async def _release(self) -> None:
        held, self._may_write_until = self.leading, float("-inf")
        self._tell()
        lease = self._sighting.lease
        if not held or lease is None:
            return
        manifest = lease_manifest(self.place, Step.RENEW, lease, "", self.wall())
        with suppress(ApiError):
            await self.cluster.replace(LEASE_KIND, *self.place, manifest)
