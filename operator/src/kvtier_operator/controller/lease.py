"""Who of several operators acts: the decision over a Lease of Kubernetes. Pure; `leadership` carries it out.

A holder renews the Lease every `RETRY_S`. It may write until `RENEW_WITHIN_S` after the *sending* of its last
successful renewal; others may take the Lease over `DURATION_S` after they last saw it change. The first is shorter,
so that at no moment two operators write. Clocks of different machines are never compared: each side measures with its
own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from kvtier_operator.kinds import LEASE_KIND
from kvtier_operator.observed import Manifest

DURATION_S = 15.0
RENEW_WITHIN_S = 10.0
RETRY_S = 2.0


class Step(Enum):
    """What to do with the Lease now."""

    CREATE = auto()
    TAKE = auto()
    RENEW = auto()
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class Lease:
    """The Lease as it was read.

    Attributes:
        holder: identity of the operator that holds it; empty = released.
        duration_s: after which others may take it.
        version: resourceVersion; it changes with each renewal.
        acquired: when the holder got it, as it stands there.
        transitions: how often the holder changed.
    """

    holder: str
    duration_s: float
    version: str
    acquired: str = ""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A Lease and since when it has looked like this, on our own clock."""

    lease: Lease | None
    since: float

    def next(self, lease: Lease | None, now: float) -> Sighting:
        """After another look."""
        same = self.lease is not None and lease is not None and self.lease.version == lease.version
        return Sighting(lease, self.since if same else now)


def decide(sighting: Sighting, identity: str, now: float) -> Step:
    """What an operator of this identity does. ``now`` is on the clock of the sighting."""
    lease = sighting.lease
    if lease is None:
        return Step.CREATE
    if lease.holder == identity:
        return Step.RENEW
    if not lease.holder or now - sighting.since >= lease.duration_s:
        return Step.TAKE
    return Step.WAIT


def read_lease(body: Mapping[str, Any]) -> Lease:
    """The record of a Lease object."""
    spec = body.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        duration_s=float(spec.get("leaseDurationSeconds") or DURATION_S),
        version=body["metadata"]["resourceVersion"],
        acquired=spec.get("acquireTime") or "",
        transitions=int(spec.get("leaseTransitions") or 0),
    )


def lease_manifest(place: tuple[str, str], step: Step, former: Lease | None, identity: str, now: float) -> Manifest:
    """The object to write.

    Args:
        place: namespace and name.
        step: CREATE, TAKE or RENEW.
        former: as it was read; its version is the precondition of the write.
        identity: the new holder; empty = release it.
        now: seconds since the epoch, shown to people only.
    """
    time = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    renews = step is Step.RENEW and former is not None
    spec: dict[str, Any] = {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(DURATION_S),
        "renewTime": time,
        "acquireTime": former.acquired if renews and former and former.acquired else time,
        "leaseTransitions": 0 if former is None else former.transitions + (step is Step.TAKE),
    }
    meta = {"namespace": place[0], "name": place[1]}
    if former is not None:
        meta["resourceVersion"] = former.version
    return {"apiVersion": LEASE_KIND.api, "kind": LEASE_KIND.name, "metadata": meta, "spec": spec}
