"""Judges plans by what was promised, whatever the planner thinks: who may be deleted, shrunk, made, and when. Pure.

It looks at the observation and the actions only, and computes each promise from scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvtier_operator import labels
from kvtier_operator.api import DrainMode, DrainTimeout, Durability, KVCacheCluster
from kvtier_operator.observed import Component, DrainPhase, MasterRole, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.actions import Action, Apply, Delete, DeletePod, LabelPod, Scale
from kvtier_operator.testing.engine_referee import broken_by_engines
from kvtier_operator.testing.sizes import Sizes, sizes_of


def broken_promises(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], revision: str) -> list[str]:
    """Every promise that these actions would break, in words; none for a good plan.

    Args:
        cluster: as wanted.
        observed: what the plan was made from.
        actions: of the plan.
        revision: of the engines that the cluster asks for.
    """
    sizes = sizes_of(observed, actions)
    checks = [_foreign(cluster, observed, actions), _order(cluster, observed, actions)]
    if not cluster.metadata.deleting:
        checks += [
            _labels(observed, actions),
            _masters(cluster, observed, actions, sizes),
            _stores(cluster, observed, actions, sizes),
            broken_by_engines(cluster, observed, actions, revision),
        ]
    return [text for check in checks for text in check]


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


def _masters(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], sizes: Sizes) -> Iterator[str]:
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


def _stores(cluster: KVCacheCluster, observed: Observed, actions: Sequence[Action], sizes: Sizes) -> Iterator[str]:
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
