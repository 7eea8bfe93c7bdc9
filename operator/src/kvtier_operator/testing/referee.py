"""Judges plans by what was promised, whatever the planner thinks: who may be deleted, shrunk, made, and when. Pure.

It looks at the observation and the actions only, and computes each promise from scratch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtier_operator import labels
from kvtier_operator.api import DrainMode, DrainTimeout, Durability, KVCacheCluster, RoleType
from kvtier_operator.observed import Component, DrainPhase, MasterRole, ObjectRef, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.actions import Action, Apply, Delete, DeletePod, LabelPod, Scale


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Replicas of every workload of ours before and after a plan."""

    before: Mapping[ObjectRef, int]
    after: Mapping[ObjectRef, int]
    labels: Mapping[ObjectRef, Mapping[str, str]]

    def of(self, component: Component) -> Iterator[ObjectRef]:
        """Workloads of a component."""
        return (ref for ref in self.after if self.labels[ref].get(labels.COMPONENT) == component)


def broken_promises(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], revision: str) -> list[str]:
    """Every promise that these actions would break, in words; none for a good plan.

    Args:
        cluster: as wanted.
        observed: what the plan was made from.
        actions: of the plan.
        revision: of the engines that the cluster asks for.
    """
    sizes = _sizes(observed, actions)
    checks = [_foreign(cluster, observed, actions), _order(cluster, observed, actions)]
    if not cluster.metadata.deleting:
        checks += [
            _labels(observed, actions),
            _masters(cluster, observed, actions, sizes),
            _stores(cluster, observed, actions, sizes),
            _engines(cluster, observed, sizes),
            _pairs(cluster, sizes),
            _halts(cluster, observed, sizes, revision),
        ]
    return [text for check in checks for text in check]


def _sizes(observed: Observed, actions: Sequence[Action]) -> _Sizes:
    kinds = ("StatefulSet", "Deployment")
    found = {ref: item for ref, item in observed.objects.items() if ref.kind in kinds}
    before = {ref: item.replicas for ref, item in found.items()}
    own = {ref: item.labels for ref, item in found.items()}
    after = dict(before)
    for action in actions:
        if isinstance(action, Apply) and action.ref.kind in kinds:
            after[action.ref] = action.manifest["spec"]["replicas"]
            own[action.ref] = action.manifest["metadata"]["labels"]
        elif isinstance(action, Scale):
            after[action.ref] = action.replicas
        elif isinstance(action, Delete) and action.ref in after:
            after[action.ref] = 0
    return _Sizes(before, after, own)


def _is_ours(cluster: KVCacheCluster, found: ObservedObject) -> bool:
    return found.owner_uid == cluster.metadata.uid


def _foreign(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action]) -> Iterator[str]:
    for action in actions:
        found = observed.objects.get(action.ref) if isinstance(action, Apply | Scale | Delete) else None
        if found is not None and not _is_ours(cluster, found):
            yield f"{type(action).__name__} of {found.ref}, which belongs to somebody else"


def _order(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action]) -> Iterator[str]:
    """Nothing is made before what it needs is there."""
    if cluster.metadata.deleting:
        made = [action.ref for action in actions if isinstance(action, Apply)]
        if made:
            yield f"{made} applied for a cluster that is being deleted"
    if not cluster.uses_store:
        return
    for action in actions:
        if not isinstance(action, Apply) or action.ref.kind != "StatefulSet" or action.ref in observed.objects:
            continue
        component = action.manifest["metadata"]["labels"][labels.COMPONENT]
        managed = cluster.coordination.managed
        if component != Component.ETCD and managed is not None:
            ready = sum(pod.ready for pod in observed.pods_of(Component.ETCD))
            if ready <= managed.replicas // 2:
                yield f"{action.ref} made without a quorum of etcd"
        if component in (Component.STORE, Component.ENGINE) and _leader(cluster, observed) is None:
            yield f"{action.ref} made without a leader"


def _leader(cluster: KVCacheCluster, observed: Observed) -> ObservedPod | None:
    """The only leader; the world never has two."""
    pods = [pod for pod in observed.pods_of(Component.MASTER) if pod.ready]
    if not cluster.coordination.uses_etcd:
        return pods[0] if pods else None
    serving = [name for name, state in observed.masters.items() if state.serving]
    return next((pod for pod in pods if pod.name in serving), None)


def _labels(observed: Observed, actions: Sequence[Action]) -> Iterator[str]:
    """At no moment two leaders by label, and only one that serves gets it."""
    labelled = {pod.name for pod in observed.pods if pod.leader}
    for action in actions:
        if not isinstance(action, LabelPod):
            continue
        if action.labels[labels.MASTER_ROLE] is None:
            labelled.discard(action.name)
            continue
        if labelled - {action.name}:
            yield f"{action.name} labelled leader beside {labelled}"
        labelled.add(action.name)


def _masters(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], sizes: _Sizes) -> Iterator[str]:
    pods = {pod.name: pod for pod in observed.pods_of(Component.MASTER)}
    going = [pods[action.name] for action in actions if isinstance(action, DeletePod) and action.name in pods]
    for ref in sizes.of(Component.MASTER):
        if cluster.uses_store and ref in sizes.before:
            if sizes.after[ref] < sizes.before[ref] - 1:
                yield f"{ref} shrinks by more than one"
            going += [pod for pod in pods.values() if sizes.after[ref] <= pod.slot < sizes.before[ref]]
    if not cluster.uses_store:
        return
    healthy = [pod for pod in going if pod.ready]
    if not healthy or cluster.master.replicas == 1 == len(pods):
        return
    if len(healthy) > 1 or any(pod.deleting or not pod.ready for pod in pods.values()):
        yield f"{[pod.name for pod in healthy]} taken away while another master is down"
    leader = _leader(cluster, observed)
    if healthy[0] is leader and not any(_can_lead(cluster, observed, pod) for pod in pods.values() if pod not in going):
        yield f"the leader {leader.name} taken away without a standby that has caught up"
    yield from _leader_last(leader, actions, pods)


def _leader_last(
    leader: ObservedPod | None, actions: Sequence[Action], pods: Mapping[str, ObservedPod]
) -> Iterator[str]:
    rolled = {action.name for action in actions if isinstance(action, DeletePod)}
    others = [pod.name for pod in pods.values() if pod is not leader and not pod.up_to_date]
    if leader is not None and leader.name in rolled and others:
        yield f"the leader {leader.name} replaced before {others}"


def _can_lead(cluster: KVCacheCluster, observed: Observed, pod: ObservedPod) -> bool:
    state = observed.masters.get(pod.name)
    if state is None or state.role is not MasterRole.STANDBY or not pod.ready:
        return False
    return state.caught_up or cluster.master.durability is Durability.NONE


def _stores(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], sizes: _Sizes) -> Iterator[str]:
    if not cluster.uses_store:
        return
    pods = {pod.name: pod for pod in observed.pods_of(Component.STORE)}
    going = [pods[action.name] for action in actions if isinstance(action, DeletePod) and action.name in pods]
    for ref in sizes.of(Component.STORE):
        before, after = sizes.before.get(ref, 0), sizes.after[ref]
        pool = sizes.labels[ref].get(labels.POOL)
        going += [pod for pod in pods.values() if pod.group == pool and after <= pod.slot < before]
    healthy = [pod for pod in going if pod.ready]
    if not healthy:
        return
    if len(healthy) > 1 or any(pod.deleting for pod in pods.values()):
        yield f"{[pod.name for pod in healthy]} taken away while another storage node leaves"
    drains = {pool.name: pool.drain for pool in cluster.pools}
    for pod in healthy:
        drain, state = drains.get(pod.group), observed.drains.get(pod.name)
        if drain is not None and drain.mode is DrainMode.DISCARD:
            continue
        if not any(other.ready for other in pods.values() if other is not pod):
            continue  # nobody could take its objects
        done = state is not None and state.phase in (DrainPhase.DONE, DrainPhase.UNSUPPORTED)
        forced = drain is not None and drain.on_timeout is DrainTimeout.FORCE
        late = state is not None and drain is not None and state.running_s * 1000 >= drain.timeout_ms
        if not done and not (forced and late):
            yield f"{pod.name} taken away undrained"


def _planned(sizes: _Sizes, counts: Mapping[ObjectRef, int]) -> Counter[str]:
    planned: Counter[str] = Counter()
    for ref in sizes.of(Component.ENGINE):
        planned[sizes.labels[ref][labels.ROLE]] += counts.get(ref, 0)
    return planned


def _taken(observed: Observed, sizes: _Sizes) -> Counter[str]:
    """Engines by role that lose their place; those that have failed serve nobody, and are no loss."""
    taken: Counter[str] = Counter()
    for ref in sizes.of(Component.ENGINE):
        own, going = sizes.labels[ref], range(sizes.after[ref], sizes.before.get(ref, 0))
        pods = _pods_of(observed, own[labels.ROLE], own[labels.REVISION])
        failed = {pod.slot for pod in pods if pod.failure}
        taken[own[labels.ROLE]] += sum(slot not in failed for slot in going)
    return taken


def _engines(cluster: KVCacheCluster, observed: Observed, sizes: _Sizes) -> Iterator[str]:
    """Never fewer pods than wanted less one unit, or than wanted with a surge, by our own doing."""
    before, after = _planned(sizes, sizes.before), _planned(sizes, sizes.after)
    paired = any(role.type is not RoleType.FUSED for role in cluster.roles)
    units = min((role.replicas for role in cluster.roles if role.replicas), default=1) if paired else 0
    for role in cluster.roles:
        unit = -(-role.replicas // units) if paired and role.replicas else 1
        floor = role.replicas if cluster.rollout.max_surge else role.replicas - unit
        # Revisions that the spec has left behind cannot have more pods than they had ports for.
        floor = min(floor, _slots_with_ports(observed, role.name)) if _without_target(sizes) else floor
        if _taken(observed, sizes)[role.name] and after[role.name] < min(before[role.name], floor):
            yield f"role {role.name} goes from {before[role.name]} to {after[role.name]} of {role.replicas}"
        yield from _ready_engines(observed, sizes, role.name, floor)


def _without_target(sizes: _Sizes) -> bool:
    """True while two revisions have pods and neither of them is rendered."""
    grown = {ref for ref in sizes.of(Component.ENGINE) if sizes.after[ref]} | {
        ref for ref in sizes.of(Component.ENGINE) if sizes.before.get(ref)
    }
    return len({sizes.labels[ref][labels.REVISION] for ref in grown}) > 1


def _slots_with_ports(observed: Observed, role: str) -> int:
    lanes = Counter(key.lane for key in observed.ledger.entries if key.group == role)
    return max(lanes.values(), default=0)


def _ready_engines(observed: Observed, sizes: _Sizes, role: str, floor: int) -> Iterator[str]:
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


def _pairs(cluster: KVCacheCluster, sizes: _Sizes) -> Iterator[str]:
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


def _halts(cluster: KVCacheCluster, observed: Observed, sizes: _Sizes, revision: str) -> Iterator[str]:
    """A rollout whose new revision has a failed pod goes neither on nor back."""
    sets = list(sizes.of(Component.ENGINE))
    own = {ref for ref in sets if sizes.labels[ref][labels.REVISION] == revision}
    failed = any(pod.failure and pod.revision == revision for pod in observed.pods_of(Component.ENGINE))
    if not failed or not any(sizes.before.get(ref) for ref in sets if ref not in own):
        return
    wanted = {role.name: role.replicas for role in cluster.roles}
    for ref in sets:
        before, after, role = sizes.before.get(ref, 0), sizes.after[ref], sizes.labels[ref][labels.ROLE]
        if after > before or (ref not in own and after < min(before, wanted.get(role, before))):
            yield f"{ref} goes from {before} to {after} while a pod of revision {revision} has failed"
