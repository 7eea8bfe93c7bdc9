"""What a plan is doing and what it waits for, in words and names; `status` turns it into conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator.observed import ObjectRef
from kvtier_operator.planning.layout import Stage


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """How far the engines are on their way to the revision that the spec asks for.

    At rest ``current`` equals ``target``, and both are empty before the first engine is made.

    Attributes:
        target: revision that the spec asks for.
        current: revision that serves meanwhile; the target when no other one has pods.
        previous: revision kept at zero replicas, ready to come back; empty = none.
        units_done: units of the target that are ready.
        units: units that the target will have.
        approval_wanted: it waits for the annotation ``kvtier.dev/approve=TARGET``.
        halted: why it stopped, with the name of the failed pod; the next change of the spec ends that. Empty = not.
        abandoned: revision in between that has to leave before the target can start; empty = none.
    """

    target: str = ""
    current: str = ""
    previous: str = ""
    units_done: int = 0
    units: int = 0
    approval_wanted: bool = False
    halted: str = ""
    abandoned: str = ""

    @property
    def running(self) -> bool:
        """True while pods of another revision than the target exist or are wanted."""
        return bool(self.abandoned) or self.current not in ("", self.target)


@dataclass(frozen=True, slots=True)
class Progress:
    """One pass, explained.

    Attributes:
        stage: the first that is not ready; None when all are.
        waiting_for: what the plan waits for, each a sentence that names the object.
        rollout: of the engines.
        draining: storage pods whose objects move away.
        blocked_drains: why a drain does not end, and the next step, by storage pod.
        exhausted: owners of port blocks that do not fit into ``spec.transport.ports``; nothing new is made.
        missing_ports: how much larger the range would have to be for them.
        taken_ports: ports that somebody else holds, each as a sentence.
        conflicts: objects of other owners that have names of ours, with what is known of the owner.
        changes: workloads that this pass makes or changes: which of their pods are outdated shows only afterwards.
        frozen: why rollouts and scale-in stand still although the spec asks for them; empty = they do not.
        deleting: the component whose pods have to go next while the cluster is drained for deletion; empty = none.
    """

    stage: Stage | None = None
    waiting_for: tuple[str, ...] = ()
    rollout: RolloutProgress = field(default_factory=RolloutProgress)
    draining: tuple[str, ...] = ()
    blocked_drains: Mapping[str, str] = field(default_factory=dict)
    exhausted: tuple[str, ...] = ()
    missing_ports: int = 0
    taken_ports: tuple[str, ...] = ()
    conflicts: Mapping[ObjectRef, str] = field(default_factory=dict)
    changes: tuple[ObjectRef, ...] = ()
    frozen: str = ""
    deleting: str = ""
