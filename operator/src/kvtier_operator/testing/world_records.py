"""What a world in memory consists of, and what may go wrong in it. Pure; see `world`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from kvtier_operator.observed import Component, DrainPhase, Manifest, ObjectRef


class Conflict(Exception):
    """A precondition of an action does not hold any more; the pass ends."""


@dataclass(slots=True)
class WorldPod:
    """A pod; ``matures`` counts the ticks until it is ready, ``leaves`` those until it is gone."""

    name: str
    uid: str
    workload: ObjectRef
    component: Component
    group: str
    slot: int
    revision: str
    template: str
    matures: int
    leaves: int = 0
    failure: str = ""
    leader: bool = False
    caught_up: bool = False

    @property
    def ready(self) -> bool:
        """It serves."""
        return not (self.matures or self.leaves or self.failure)


@dataclass(slots=True)
class WorldObject:
    """An object as the API server has it."""

    live: Manifest
    uid: str


@dataclass(slots=True)
class Drainage:
    """A drain that was asked for, of the pod with this uid."""

    uid: str
    phase: DrainPhase
    since: float
    lasts: int
    ends: DrainPhase


@dataclass(slots=True)
class Faults:
    """What may go wrong, each a chance per tick or occasion.

    Attributes:
        pod_dies: a ready pod vanishes.
        pod_fails: a pod fails for a few ticks instead of becoming ready.
        leader_lost: the leader steps down.
        edit: somebody changes or deletes a child by hand.
        conflict: somebody else writes the ledger first.
        cut: the operator dies before an action.
        drain_fails: a drain ends without success.
        drain_forgotten: the operator dies after a drain has begun and before it has written that down.
        drain_moves: objects are on their way when a drain is to be ended, which the master then refuses.
    """

    pod_dies: float = 0.0
    pod_fails: float = 0.0
    leader_lost: float = 0.0
    edit: float = 0.0
    conflict: float = 0.0
    cut: float = 0.0
    drain_fails: float = 0.0
    drain_forgotten: float = 0.0
    drain_moves: float = 0.0


def template_of(workload: Manifest) -> str:
    """Hash of a workload's pod template."""
    text = json.dumps(workload["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
