"""How many engines each revision has now: first creation, scaling, rollout, rollback. Pure; called by `plan`.

A change of what an engine is makes a new revision with sets and a lane of its own; the old one shrinks while the new
one grows, by whole units (`units`), and stays at zero replicas afterwards. To roll back is to make the old one the
target again. The rollout stops at the first pod of the new revision that fails, and goes on when the spec changes.

A third revision finds both lanes taken. Then the one of the two that serves less leaves first, and the other
one grows in its place as far as it has ports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, RoleType, RolloutPolicy
from kvtier_operator.observed import Observed
from kvtier_operator.planning.actions import Delete, Emit, Scale
from kvtier_operator.planning.layout import EngineSet
from kvtier_operator.planning.progress import RolloutProgress
from kvtier_operator.planning.remembered import last_revision, was_halted, was_rolling_out, was_true
from kvtier_operator.planning.revision import Revision
from kvtier_operator.planning.revisions import EngineRevision, engine_revisions, free_lane
from kvtier_operator.planning.units import Counts, Step, Units, next_step
from kvtier_operator.planning.wants import owner_of


@dataclass(frozen=True, slots=True)
class EnginesPlan:
    """What happens to the engines now.

    Attributes:
        revision: that the spec asks for.
        replicas: of its sets by role.
        rendered: its sets may be made; False while it waits for an approval or a lane.
        scales: of sets of other revisions, smaller ones first.
        deletes: objects of revisions that nobody will come back to.
        events: what is news.
        progress: for the status.
        waiting: why nothing else happens; empty = there is nothing else to do.
    """

    revision: Revision
    replicas: Counts
    rendered: bool = True
    scales: tuple[Scale, ...] = ()
    deletes: tuple[Delete, ...] = ()
    events: tuple[Emit, ...] = ()
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    waiting: str = ""

    @property
    def sets(self) -> tuple[EngineSet, ...]:
        """As in a layout."""
        return tuple(EngineSet(role, self.revision, replicas) for role, replicas in self.replicas.items())


def plan_engines(cluster: KVCacheCluster, observed: Observed, target: str, hold: str) -> EnginesPlan:
    """Decide how many pods of each revision there are now.

    Args:
        cluster: as wanted.
        observed: as it is.
        target: name of the revision that the spec asks for.
        hold: why a rollout may not take its next step; empty = it may.
    """
    revisions = engine_revisions(cluster, observed)
    own = revisions.get(target, EngineRevision(target))
    others = [revision for name, revision in revisions.items() if name != target]
    busy = sorted((one for one in others if one.busy), key=lambda one: _worth(cluster, observed, one))
    if not busy:
        return _at_rest(cluster, observed, own, others)
    lane = own.lane or free_lane(busy, "")
    if not lane:
        return _clear_lane(cluster, observed, own, busy, hold)
    return _roll(cluster, observed, _Rollout(own, Revision(target, lane), busy, others), hold)


def _worth(cluster: KVCacheCluster, observed: Observed, one: EngineRevision) -> tuple[int, int, bool, str]:
    """The least worthy leaves first: the one that serves less; of equals, one that has not served before."""
    units = _units(cluster).complete(one.ready) if _paired(cluster) else 0
    return units, sum(one.ready.values()), one.name == last_revision(observed), one.name


@dataclass(frozen=True, slots=True)
class _Rollout:
    own: EngineRevision
    revision: Revision
    busy: Sequence[EngineRevision]
    others: Sequence[EngineRevision]


def _at_rest(
    cluster: KVCacheCluster, observed: Observed, own: EngineRevision, others: Sequence[EngineRevision]
) -> EnginesPlan:
    """No other revision runs: the target simply has what is wanted."""
    served = last_revision(observed)
    revision = Revision(own.name, own.lane or free_lane(others, served))
    history = sorted(
        (one for one in others if one.lane != revision.lane), key=lambda one: (one.name != served, one.name)
    )
    kept = history[0].name if history else ""
    return EnginesPlan(
        revision,
        _wanted(cluster),
        deletes=_delete(one for one in others if one.name != kept),
        events=(Emit("RolloutCompleted", f"revision {own.name} has taken over"),) if was_rolling_out(observed) else (),
        progress=_progress(cluster, own, current=own.name if own.objects else "", previous=kept),
    )


def _roll(cluster: KVCacheCluster, observed: Observed, rollout: _Rollout, hold: str) -> EnginesPlan:
    """Take the next step from the busy revisions to the target, or say why not."""
    own, busy = rollout.own, rollout.busy
    approval = _wants_approval(cluster, own.name)
    halted = _halted(cluster, observed, own)
    stopped = hold or halted or (f"revision {own.name} waits for approval" if approval else "")
    old = _total(busy)
    if stopped:
        step = _stand_still(cluster, own, old)
    else:
        step = next_step(_units(cluster), new=own.given, ready=own.ready, old=old, max_surge=cluster.rollout.max_surge)
    rendered = bool(own.objects) or not stopped
    idle = [one for one in rollout.others if not one.busy]
    return EnginesPlan(
        rollout.revision,
        step.new,
        rendered=rendered,
        scales=_shrink(busy, step.old),
        deletes=_delete(idle) if rendered else (),
        events=_roll_events(observed, own, busy[-1].name, halted=halted, begins=not stopped and not own.objects),
        progress=_progress(
            cluster,
            own,
            current=busy[-1].name,
            previous="" if rendered or not idle else idle[0].name,
            approval_wanted=approval,
            halted=halted,
        ),
        waiting=stopped or f"engines: revision {own.name} takes over from {busy[-1].name}",
    )


def _clear_lane(
    cluster: KVCacheCluster, observed: Observed, own: EngineRevision, busy: Sequence[EngineRevision], hold: str
) -> EnginesPlan:
    """Both lanes are taken by revisions that the spec has left behind: one has to go."""
    *leaving, base = busy
    approval = _wants_approval(cluster, own.name)
    stopped = hold or (f"revision {own.name} waits for approval" if approval else "")
    scales: tuple[Scale, ...] = ()
    if not stopped:
        step = _exchange(cluster, observed, base, _total(leaving))
        scales = _shrink(leaving, step.old)
        # Once the lane is free the target grows instead, if what is left is enough until then.
        if any(step.old.values()) or not _units(cluster).enough(base.given, cluster.rollout.max_surge):
            scales = (*scales, *_grow(base, step.new))
    return EnginesPlan(
        Revision(own.name, ""),
        dict.fromkeys(_wanted(cluster), 0),
        rendered=False,
        scales=scales,
        progress=_progress(cluster, own, current=base.name, abandoned=leaving[0].name, approval_wanted=approval),
        waiting=stopped or f"engines: revision {leaving[0].name} has to leave before {own.name} can start",
    )


def _exchange(cluster: KVCacheCluster, observed: Observed, base: EngineRevision, old: Counts) -> Step:
    """The next step from the revisions that leave to the one that stays, which grows as far as it has ports."""
    wanted, room = _wanted(cluster), _room(cluster, observed, base)
    reachable = Units({role: min(size, room.get(role, 0)) for role, size in wanted.items()}, _paired(cluster))
    if _paired(cluster) and any(size and not reachable.wanted[role] for role, size in wanted.items()):
        # It lacks a role, so it serves nobody however large it grows, and the others serve no more than it.
        return Step(base.given, dict.fromkeys(old, 0))
    # A pod of the base that has failed is not waited for: the target may be what mends it.
    ready = Counter(base.ready) + Counter(pod.group for pod in base.failed)
    step = next_step(reachable, new=base.given, ready=ready, old=old, max_surge=cluster.rollout.max_surge)
    if reachable.complete(ready) == reachable.total:
        return step
    # While fewer run than are wanted, nobody has to make room.
    beside = {role: wanted.get(role, 0) - step.new.get(role, 0) for role in old}
    return Step(step.new, {role: max(step.old[role], min(count, beside[role])) for role, count in old.items()})


def _wants_approval(cluster: KVCacheCluster, target: str) -> bool:
    supervised = cluster.rollout.policy is RolloutPolicy.SUPERVISED
    return supervised and cluster.metadata.annotations.get(labels.APPROVE) != target


def _halted(cluster: KVCacheCluster, observed: Observed, own: EngineRevision) -> str:
    if own.failed:
        pod = own.failed[0]
        return f"{pod.name} of revision {own.name} has failed ({pod.failure})"
    if own.objects and was_halted(observed, cluster.metadata.generation):
        return f"a pod of revision {own.name} had failed"
    return ""


def _stand_still(cluster: KVCacheCluster, own: EngineRevision, old: Counts) -> Step:
    """No step, but fewer pods where the user wants fewer."""
    wanted = _wanted(cluster)
    return Step(
        new={role: min(own.given.get(role, 0), size) for role, size in wanted.items()},
        old={role: min(count, wanted.get(role, count)) for role, count in old.items()},
    )


def _roll_events(
    observed: Observed, own: EngineRevision, former: str, *, halted: str, begins: bool
) -> tuple[Emit, ...]:
    if begins:
        return (Emit("RolloutStarted", f"revision {own.name} takes over from {former}"),)
    if halted and not was_true(observed, "RolloutHalted"):
        return (Emit("RolloutHalted", f"{halted}; the rollout goes on when the spec changes", warning=True),)
    return ()


def _progress(
    cluster: KVCacheCluster,
    own: EngineRevision,
    *,
    current: str,
    previous: str = "",
    approval_wanted: bool = False,
    halted: str = "",
    abandoned: str = "",
) -> RolloutProgress:
    units = _units(cluster)
    return RolloutProgress(
        own.name, current, previous, units.complete(own.ready), units.total, approval_wanted, halted, abandoned
    )


def _wanted(cluster: KVCacheCluster) -> Counts:
    return {role.name: role.replicas for role in cluster.roles}


def _paired(cluster: KVCacheCluster) -> bool:
    return any(role.type is not RoleType.FUSED for role in cluster.roles)


def _units(cluster: KVCacheCluster) -> Units:
    return Units(_wanted(cluster), _paired(cluster))


def _total(revisions: Iterable[EngineRevision]) -> Counts:
    total: Counter[str] = Counter()
    for revision in revisions:
        total.update(revision.given)
    return total


def _room(cluster: KVCacheCluster, observed: Observed, one: EngineRevision) -> Counts:
    """Pods by role that a revision has or had ports for: more it cannot have, because it is not rendered again."""
    owner = owner_of(cluster)
    slots = Counter(key.group for key in observed.ledger.entries if (key.cluster, key.lane) == (owner, one.lane))
    return {role: max(given, slots[role]) for role, given in one.given.items()}


def _shrink(revisions: Sequence[EngineRevision], allowed: Counts) -> tuple[Scale, ...]:
    """Take what is too much from the first revisions first."""
    scales = []
    excess = {role: count - allowed.get(role, 0) for role, count in _total(revisions).items()}
    for revision in revisions:
        for role, found in revision.sets.items():
            leaving = min(found.replicas, excess[role])
            if leaving > 0:
                excess[role] -= leaving
                why = f"revision {revision.name} leaves"
                scales.append(Scale(found.ref, found.uid, found.replicas - leaving, why))
    return tuple(scales)


def _grow(revision: EngineRevision, counts: Counts) -> tuple[Scale, ...]:
    sets: Mapping[str, int] = {role: counts.get(role, 0) for role in revision.sets}
    return tuple(
        Scale(found.ref, found.uid, sets[role], f"revision {revision.name} serves until the next one can start")
        for role, found in revision.sets.items()
        if sets[role] > found.replicas
    )


def _delete(revisions: Iterable[EngineRevision]) -> tuple[Delete, ...]:
    return tuple(
        Delete(item.ref, item.uid, f"revision {revision.name} is history")
        for revision in revisions
        for item in revision.objects
    )
