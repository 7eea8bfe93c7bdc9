"""Judges plans by what was promised of engines: how many stay, how many come, and in which company. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, Role, RoleType
from kvtier_operator.observed import Component, ObjectRef, Observed, ObservedPod
from kvtier_operator.planning.actions import Action, Apply, Scale
from kvtier_operator.testing.sizes import Sizes, sizes_of

LANES_IN_USE = 2
"""No third revision can run."""


def broken_by_engines(
    cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], revision: str
) -> Iterator[str]:
    """Every promise about engines that these actions would break, in words.

    Args:
        cluster: as wanted.
        observed: what the plan was made from.
        actions: of the plan.
        revision: that the cluster asks for.
    """
    sizes = sizes_of(observed, actions)
    yield from _floors(cluster, observed, sizes, revision)
    yield from _budget(cluster, observed, actions)
    yield from _pairs(cluster, sizes)
    yield from _halts(cluster, observed, sizes, revision)


def _planned(sizes: Sizes, counts: Mapping[ObjectRef, int]) -> Counter[str]:
    planned: Counter[str] = Counter()
    for ref in sizes.of(Component.ENGINE):
        planned[sizes.labels[ref][labels.ROLE]] += counts.get(ref, 0)
    return planned


def _taken(observed: Observed, sizes: Sizes) -> Counter[str]:
    """Engines by role that lose their place; those that have failed serve nobody, and are no loss."""
    taken: Counter[str] = Counter()
    for ref in sizes.of(Component.ENGINE):
        own, going = sizes.labels[ref], range(sizes.after[ref], sizes.before.get(ref, 0))
        pods = _pods_of(observed, own[labels.ROLE], own[labels.REVISION])
        failed = {pod.slot for pod in pods if pod.failure}
        taken[own[labels.ROLE]] += sum(slot not in failed for slot in going)
    return taken


def _floors(cluster: KVCacheCluster, observed: Observed, sizes: Sizes, revision: str) -> Iterator[str]:
    """Never fewer pods than wanted less one unit, or than wanted with a surge, by our own doing."""
    before, after = _planned(sizes, sizes.before), _planned(sizes, sizes.after)
    for role in cluster.roles:
        unit = _unit(cluster, role)
        floor = role.replicas if cluster.rollout.max_surge else role.replicas - unit
        reach = _reach(cluster, observed, sizes, revision)
        floor = floor if reach is None else min(floor, reach.get(role.name, 0))
        if _taken(observed, sizes)[role.name] and after[role.name] < min(before[role.name], floor):
            yield f"role {role.name} goes from {before[role.name]} to {after[role.name]} of {role.replicas}"
        yield from _ready_engines(observed, sizes, role.name, floor)


def _unit(cluster: KVCacheCluster, role: Role) -> int:
    """Pods of a role in a unit, at most."""
    paired = any(one.type is not RoleType.FUSED for one in cluster.roles)
    units = min((one.replicas for one in cluster.roles if one.replicas), default=1)
    return -(-role.replicas // units) if paired and role.replicas else 1


def _budget(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action]) -> Iterator[str]:
    """At no moment more pods than wanted and the surge, or than there were: devices may be counted."""
    before = _planned(sizes_of(observed, ()), sizes_of(observed, ()).before)
    for count in range(1, len(actions) + 1):
        if not isinstance(actions[count - 1], Apply | Scale):
            continue
        sizes = sizes_of(observed, actions[:count])
        after = _planned(sizes, sizes.after)
        for role in cluster.roles:
            most = max(before[role.name], role.replicas + cluster.rollout.max_surge * _unit(cluster, role))
            if after[role.name] > most:
                yield f"role {role.name} has {after[role.name]} pods for a moment, {most} is the most"


def _reach(cluster: KVCacheCluster, observed: Observed, sizes: Sizes, revision: str) -> Mapping[str, int] | None:
    """Pods by role that can be had before the target may start; None = the target may have pods.

    Two revisions that the spec has left behind hold both lanes. One stays, and cannot have more pods than it had ports
    for; without pods for one of two split roles it serves nobody.
    """
    sets = [ref for ref in sizes.of(Component.ENGINE) if ref in sizes.before]
    revisions = {sizes.labels[ref][labels.REVISION] for ref in sets}
    if revision in revisions or len(revisions) < LANES_IN_USE:
        return None
    reaches = [_room(cluster, observed, sizes, [ref for ref in sets if _is_of(sizes, ref, one)]) for one in revisions]
    return {role.name: min(reach[role.name] for reach in reaches) for role in cluster.roles}


def _is_of(sizes: Sizes, ref: ObjectRef, revision: str) -> bool:
    return sizes.labels[ref][labels.REVISION] == revision


def _room(cluster: KVCacheCluster, observed: Observed, sizes: Sizes, sets: Sequence[ObjectRef]) -> Mapping[str, int]:
    """Pods by role that a revision has or had ports for."""
    room = dict.fromkeys((role.name for role in cluster.roles), 0)
    for ref in sets:
        own = sizes.labels[ref]
        place = (own[labels.ROLE], own[labels.LANE])
        slots = sum((key.group, key.lane) == place for key in observed.ledger.entries)
        room[own[labels.ROLE]] = max(slots, sizes.before[ref])
    paired = any(role.type is not RoleType.FUSED for role in cluster.roles)
    lacks = paired and any(role.replicas and not room[role.name] for role in cluster.roles)
    return dict.fromkeys(room, 0) if lacks else room


def _ready_engines(observed: Observed, sizes: Sizes, role: str, floor: int) -> Iterator[str]:
    """The same counted in ready pods, as long as nothing but our rollout takes any."""
    left = full = 0
    for ref in sizes.of(Component.ENGINE):
        own = sizes.labels[ref]
        if own[labels.ROLE] != role or ref not in sizes.before:
            continue
        ready = {pod.slot for pod in _pods_of(observed, role, own[labels.REVISION]) if pod.ready}
        left += sum(slot < sizes.after[ref] for slot in ready)
        full += sum(slot < sizes.before[ref] for slot in ready)
        if any(pod.failure for pod in _pods_of(observed, role, own[labels.REVISION])):
            return
    if full == _planned(sizes, sizes.before)[role] and left < min(full, floor):
        yield f"role {role} is left with {left} ready engines of {full}, {floor} were promised"


def _pods_of(observed: Observed, role: str, revision: str) -> list[ObservedPod]:
    return [pod for pod in observed.pods_of(Component.ENGINE, role) if pod.revision == revision]


def _pairs(cluster: KVCacheCluster, sizes: Sizes) -> Iterator[str]:
    """A revision never has one role of a unit without the other."""
    if all(role.type is RoleType.FUSED for role in cluster.roles):
        return
    wanted = {role.name for role in cluster.roles if role.replicas}
    by_revision: dict[str, Counter[str]] = {}
    for ref in sizes.of(Component.ENGINE):
        own = sizes.labels[ref]
        if sizes.after[ref] > sizes.before.get(ref, 0):
            by_revision.setdefault(own[labels.REVISION], Counter())
    for ref in sizes.of(Component.ENGINE):
        own = sizes.labels[ref]
        if own[labels.REVISION] in by_revision:
            by_revision[own[labels.REVISION]][own[labels.ROLE]] += sizes.after[ref]
    for revision, counts in by_revision.items():
        if any(not counts[role] for role in wanted):
            yield f"revision {revision} grows with only a part of its roles: {dict(counts)}"


def _halts(cluster: KVCacheCluster, observed: Observed, sizes: Sizes, revision: str) -> Iterator[str]:
    """A rollout whose new revision has a failed pod goes neither on nor back."""
    sets = list(sizes.of(Component.ENGINE))
    own = {ref for ref in sets if sizes.labels[ref][labels.REVISION] == revision}
    pods = [pod for pod in observed.pods_of(Component.ENGINE) if pod.revision == revision and not pod.deleting]
    failed = any(pod.failure for pod in pods)
    if not failed or not any(sizes.before.get(ref) for ref in sets if ref not in own):
        return
    wanted = {role.name: role.replicas for role in cluster.roles}
    for ref in sets:
        before, after, role = sizes.before.get(ref, 0), sizes.after[ref], sizes.labels[ref][labels.ROLE]
        if after > before or (ref not in own and after < min(before, wanted.get(role, before))):
            yield f"{ref} goes from {before} to {after} while a pod of revision {revision} has failed"
