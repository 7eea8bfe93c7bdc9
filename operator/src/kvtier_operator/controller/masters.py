"""The port to a master's admin HTTP interface, and what the operator remembers of its answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtier_operator.errors import OperatorError
from kvtier_operator.observed import DrainPhase, MasterRole, MasterState


class AdminAddress(NamedTuple):
    """Where a master's admin interface listens."""

    host: str
    port: int


class MasterSilent(OperatorError):
    """The master does not answer, or not in a way that we know."""


class DrainUnsupported(OperatorError):
    """The running master has no drain jobs, or nothing of this segment to move."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a master says of itself.

    Attributes:
        serving: it is leader and answers clients.
        leader: address of the leader that it knows.
        view_version: of the election that it knows.
        lag: entries of the leader's log that a standby has not applied; None = it does not say.
    """

    role: MasterRole
    serving: bool
    leader: str = ""
    view_version: int = 0
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain job is."""

    phase: DrainPhase
    detail: str = ""


class MasterAdmin(Protocol):
    """Admin calls. Each ends within seconds and raises `MasterSilent` when there is no answer."""

    async def health(self, address: AdminAddress) -> Health:
        """What the master says of itself, on leaders and standbys."""

    async def segments(self, address: AdminAddress) -> tuple[str, ...]:
        """Names of the mounted segments, host:port each; the leader knows them."""

    async def start_drain(self, address: AdminAddress, segment: str) -> str:
        """Start to move a segment's objects elsewhere; returns the job.

        Of a segment that drains already, or has drained, it is one that follows the segment itself: whoever started
        the drain lost the name of its job.

        Raises:
            DrainUnsupported: the master has no drain jobs.
        """

    async def drain_progress(self, address: AdminAddress, job: str) -> DrainProgress:
        """How far a job is. A job that the master does not know has failed: a new leader has none of the old one's."""

    async def cancel_drain(self, address: AdminAddress, job: str) -> bool:
        """End a job; True = its segment takes objects again.

        False = objects are on their way at this moment, so it has to be asked again; or all of them have moved, and the
        segment stays closed until its node mounts it anew.
        """


@dataclass(frozen=True, slots=True)
class MastersView:
    """The newest answers of one cluster's masters.

    Attributes:
        masters: by pod; those that answered.
        leader: where the serving leader's admin interface is; None = unknown.
        segments: segment names by storage pod.
        drains: by job.
    """

    masters: Mapping[str, MasterState] = field(default_factory=dict)
    leader: AdminAddress | None = None
    segments: Mapping[str, str] = field(default_factory=dict)
    drains: Mapping[str, DrainProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Targets:
    """What to ask of one cluster.

    Attributes:
        masters: admin addresses by pod.
        stores: storage pods by what a segment's host may be: the pod's name or its address.
        jobs: drain jobs.
    """

    masters: Mapping[str, AdminAddress] = field(default_factory=dict)
    stores: Mapping[str, str] = field(default_factory=dict)
    jobs: frozenset[str] = frozenset()
