"""Who leads the masters, and which of them may be replaced or leave. Pure; called by `plan`.

Standbys go first, one at a time, while every other master is ready and has caught up; the leader goes last, behind a
standby that has. Losing a second master, or the leader without a successor, would cost the metadata of the whole store.
A master that is broken and has an outdated template may always be replaced: it might be the one that needs the fix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier_operator import labels, names
from kvtier_operator.api import Durability, KVCacheCluster
from kvtier_operator.observed import Component, MasterRole, ObjectRef, Observed, ObservedPod
from kvtier_operator.planning.actions import Action, DeletePod, Emit, LabelPod
from kvtier_operator.planning.pods import blocker, is_broken
from kvtier_operator.planning.remembered import last_leader, seconds_without_leader

ELECTION_S = 60.0
"""After so long without a leader it is not an election that goes on: the masters need the new template."""


@dataclass(frozen=True, slots=True)
class MastersPlan:
    """What happens to the masters now.

    Attributes:
        replicas: of their set.
        actions: labels, deletions and events.
        waiting: why nothing else happens; empty = there is nothing else to do.
    """

    replicas: int
    actions: tuple[Action, ...] = ()
    waiting: str = ""


def plan_masters(cluster: KVCacheCluster, observed: Observed, frozen: str) -> MastersPlan:
    """Decide about labels, scale-in and the roll of an outdated template.

    Args:
        cluster: as wanted.
        observed: as it is.
        frozen: why no master may go now; empty = one may.
    """
    if not cluster.uses_store:
        return MastersPlan(0)
    leader = leading_master(cluster, observed)
    pods = observed.pods_of(Component.MASTER)
    replicas, waiting = _replicas(cluster, observed, leader, frozen)
    going, why = _outdated(cluster, observed, leader, frozen)
    return MastersPlan(
        replicas,
        (
            *_labels(observed, pods, leader),
            *_events(observed, leader),
            *(DeletePod(pod.name, pod.uid, "its template is outdated") for pod in going),
        ),
        waiting or why,
    )


def leading_master(cluster: KVCacheCluster, observed: Observed) -> ObservedPod | None:
    """The pod that leads and answers clients; of two that say so, the one of the later election."""
    pods = [pod for pod in observed.pods_of(Component.MASTER) if not pod.deleting]
    if not cluster.coordination.uses_etcd:
        return next((pod for pod in pods if pod.ready), None)
    states = observed.masters
    serving = [pod for pod in pods if pod.name in states and states[pod.name].serving]
    serving = [pod for pod in serving if states[pod.name].role is MasterRole.LEADER]
    return max(serving, key=lambda pod: (states[pod.name].view_version, pod.leader, -pod.slot), default=None)


def _labels(observed: Observed, pods: tuple[ObservedPod, ...], leader: ObservedPod | None) -> tuple[LabelPod, ...]:
    """The label leaves a former leader before it comes to the next one, so that two never bear it by our doing."""
    former = [pod for pod in pods if pod.leader and pod is not leader]
    # A leader that is silent for a moment keeps it: nobody else could serve in its place.
    former = [pod for pod in former if leader is not None or pod.deleting or _is_standby(observed, pod)]
    unlabel = [LabelPod(pod.name, pod.uid, {labels.MASTER_ROLE: None}, "it does not lead any more") for pod in former]
    if leader is None or leader.leader:
        return tuple(unlabel)
    return (*unlabel, LabelPod(leader.name, leader.uid, {labels.MASTER_ROLE: labels.LEADER}, "it leads"))


def _events(observed: Observed, leader: ObservedPod | None) -> tuple[Emit, ...]:
    former = last_leader(observed)
    if leader is not None and leader.name != former:
        return (Emit("LeaderElected", f"{leader.name} leads" + (f" after {former}" if former else "")),)
    if leader is None and former:
        text = f"{former} does not lead any more; engines go on without the store until another master does"
        return (Emit("LeaderLost", text, warning=True),)
    return ()


def _is_standby(observed: Observed, pod: ObservedPod) -> bool:
    state = observed.masters.get(pod.name)
    return state is not None and state.role is MasterRole.STANDBY


def _can_follow(cluster: KVCacheCluster, observed: Observed, pod: ObservedPod) -> bool:
    """True for a standby that could lead with nothing lost that the durability promises."""
    state = observed.masters.get(pod.name)
    if not pod.ready or state is None or state.role is not MasterRole.STANDBY:
        return False
    return state.caught_up or cluster.master.durability is Durability.NONE


def _replicas(cluster: KVCacheCluster, observed: Observed, leader: ObservedPod | None, frozen: str) -> tuple[int, str]:
    """Size of the set now, and why it is not the wanted one yet. It grows at once and shrinks by one at a time."""
    wanted = cluster.master.replicas
    found = observed.objects.get(ObjectRef("StatefulSet", names.master_set(cluster.name)))
    if found is None or found.replicas <= wanted:
        return wanted, ""
    size = found.replicas
    last = next((pod for pod in observed.pods_of(Component.MASTER) if pod.slot == size - 1), None)
    if not frozen and (last is None or (is_broken(last) and last is not leader)):
        return size - 1, ""
    obstacle = frozen or next(_obstacles_to_leaving(cluster, observed, leader, size), "")
    return (size, obstacle) if obstacle else (size - 1, "")


def _obstacles_to_leaving(
    cluster: KVCacheCluster, observed: Observed, leader: ObservedPod | None, size: int
) -> Iterator[str]:
    """Why the master of the highest slot may not leave."""
    pods = observed.pods_of(Component.MASTER)
    if any(pod.slot >= size for pod in pods):
        yield "masters: one is leaving"
    if leader is None:
        yield "masters: none leads, so none can leave"
    others = [pod for pod in pods if pod.slot != size - 1]
    yield from (f"masters: {blocker(pod)}" for pod in others if not pod.ready)
    followers = [pod for pod in others if _can_follow(cluster, observed, pod)]
    if leader is not None and leader.slot == size - 1 and not followers:
        yield f"masters: no standby has caught up with {leader.name}, which has to leave"


def _outdated(
    cluster: KVCacheCluster, observed: Observed, leader: ObservedPod | None, frozen: str
) -> tuple[tuple[ObservedPod, ...], str]:
    """Masters to be replaced now, and why no other is."""
    pods = observed.pods_of(Component.MASTER)
    outdated = [pod for pod in pods if not pod.up_to_date and not pod.deleting]
    if not outdated or frozen:
        return (), frozen if outdated else ""
    if broken := tuple(pod for pod in outdated if is_broken(pod) and pod is not leader):
        return broken, ""
    if cluster.master.replicas == 1 and len(pods) == 1:
        return tuple(outdated), ""
    # The leader last.
    candidate = max(outdated, key=lambda pod: (pod is not leader, pod.slot))
    obstacle = next(_obstacles_to_replacing(cluster, observed, leader, candidate), "")
    return ((), obstacle) if obstacle else ((candidate,), "")


def _obstacles_to_replacing(
    cluster: KVCacheCluster, observed: Observed, leader: ObservedPod | None, candidate: ObservedPod
) -> Iterator[str]:
    """Why a healthy master may not be replaced: all have to be there, and the others able to lead."""
    pods = observed.pods_of(Component.MASTER)
    if len(pods) != cluster.master.replicas:
        yield f"masters: {len(pods)} of {cluster.master.replicas} exist"
    yield from (f"masters: {blocker(pod)}" for pod in pods if not pod.ready)
    if leader is None:
        if seconds_without_leader(observed) < ELECTION_S:
            yield "masters: none leads, so none is replaced"
        return
    behind = [pod for pod in pods if pod not in (candidate, leader) and not _can_follow(cluster, observed, pod)]
    yield from (f"masters: {pod.name} has not caught up with {leader.name}" for pod in behind)
