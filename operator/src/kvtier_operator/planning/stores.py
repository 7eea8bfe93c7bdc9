"""Which storage node leaves next, and what has to happen to its objects before. Pure; called by `plan`.

One node of the cluster leaves at a time, whatever its pool, and only while the others are there to take its objects:

    drain job asked for ──▶ running ──▶ done ──▶ the pod goes
                              │  └─ longer than allowed: Pause says so and waits, Force lets the pod go
                              ├─ failed: tried again while Pause waits; never a reason to delete
                              └─ the master has no drain jobs: the daemon unmounts gracefully instead

A node whose leaving is not wanted any more has its drain ended. If its objects have all moved by then, only a new start
makes its segment take objects again, and the pod goes all the same. Nodes that are broken have nothing to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvtier_operator.api import Drain, DrainMode, DrainTimeout, KVCacheCluster
from kvtier_operator.observed import Component, DrainPhase, DrainState, Observed, ObservedPod
from kvtier_operator.planning.actions import Action, CancelDrain, DeletePod, Emit, Scale, StartDrain
from kvtier_operator.planning.masters import leading_master
from kvtier_operator.planning.pods import blocker, is_broken
from kvtier_operator.planning.remembered import was_true
from kvtier_operator.planning.workloads import Workload, workloads_of

RETRY_S = 60.0
"""A failed drain is tried again after so long, for space may have come."""
_EMPTY = "all its objects have moved, and its segment takes no new ones until it starts anew"


class SegmentOf(Protocol):
    """Name of a storage pod's segment in the store."""

    def __call__(self, pool: str, slot: int) -> str:
        """``HOST:PORT`` as the node told the master."""


@dataclass(frozen=True, slots=True)
class StoresPlan:
    """What happens to the storage nodes now.

    Attributes:
        replicas: of the pools that the spec has.
        actions: drains, deletions, and the scaling of pools that the spec has no more.
        draining: pods whose objects move.
        blocked: why a drain does not end, and the next step, by pod.
        waiting: why nothing else happens; empty = there is nothing else to do.
    """

    replicas: Mapping[str, int] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    draining: tuple[str, ...] = ()
    blocked: Mapping[str, str] = field(default_factory=dict)
    waiting: str = ""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A pod that has to go: to come back with a new template or segment, or for good with its set shrunk by one."""

    pod: ObservedPod
    drain: Drain
    why: str
    shrink: Workload | None = None


def plan_stores(cluster: KVCacheCluster, observed: Observed, frozen: str, segment_of: SegmentOf) -> StoresPlan:
    """Decide about drains, scale-in and the roll of an outdated template.

    Args:
        cluster: as wanted.
        observed: as it is.
        frozen: why no node may go now; empty = one may.
        segment_of: name of a pod's segment.
    """
    if not cluster.uses_store:
        return StoresPlan()
    sets = workloads_of(cluster, observed, Component.STORE)
    replicas, leaving, gone = _sizes(cluster, observed, sets)
    names = {item.pod.name for item in leaving}
    led = leading_master(cluster, observed) is not None  # only a leader can end a job
    staying = [pod for pod in observed.pods_of(Component.STORE) if pod.name not in names and not pod.deleting]
    unwanted = [(pod, observed.drains[pod.name]) for pod in staying if pod.name in observed.drains]
    leaving += [_Leaving(pod, Drain(), _EMPTY) for pod, state in unwanted if state.phase is DrainPhase.DONE]
    stale: list[Action] = [
        CancelDrain(pod.name, pod.uid, state.job)
        for pod, state in unwanted
        if state.phase is DrainPhase.UNSUPPORTED or (led and state.phase is not DrainPhase.DONE)
    ]
    running = tuple(pod.name for pod, state in unwanted if state.phase is DrainPhase.RUNNING)
    plan = StoresPlan(replicas, (*stale, *gone), running)
    broken = [item for item in leaving if is_broken(item.pod)]
    for item in broken:
        plan = _let_go(plan, item)
    whole = [item for item in leaving if item not in broken]
    if not whole:
        return plan
    # A drain that has begun is finished first; then what leaves for good; then the roll, from the highest slot.
    item = min(whole, key=lambda item: (item.pod.name not in observed.drains, item.shrink is None, -item.pod.slot))
    if frozen:
        return replace(plan, waiting=frozen)
    if why := _others_missing(observed, sets, item):
        return replace(plan, waiting=why)
    return _next(plan, cluster, observed, item, segment_of)


def _sizes(
    cluster: KVCacheCluster, observed: Observed, sets: tuple[Workload, ...]
) -> tuple[dict[str, int], list[_Leaving], list[Action]]:
    """Replicas of each pool as they are or grow, pods that have to leave, and the scaling that needs no leave."""
    pools = {pool.name: pool for pool in cluster.pools}
    replicas = {name: pool.replicas for name, pool in pools.items()}
    leaving: list[_Leaving] = []
    gone: list[Action] = []
    for workload in sets:
        pool = pools.get(workload.group)
        size, wanted = workload.found.replicas, pool.replicas if pool else 0
        pods = observed.pods_of(Component.STORE, workload.group)
        drain = pool.drain if pool else Drain()
        last = next((pod for pod in pods if pod.slot == size - 1), None)
        if pool:
            replicas[workload.group] = max(size, wanted)
        if size > wanted and last is None:
            # Its pod was never made, or is gone.
            gone += _shrink(workload, replicas)
        elif size > wanted and last is not None and not last.deleting:
            leaving.append(_Leaving(last, drain, "its pool shrinks", workload))
        shrinking = {item.pod for item in leaving}
        rolled = [pod for pod in pods if not pod.up_to_date and not pod.deleting and pod.slot < min(size, wanted)]
        leaving += [_Leaving(pod, drain, "its template is outdated") for pod in rolled if pod not in shrinking]
    return replicas, leaving, gone


def _shrink(workload: Workload, replicas: dict[str, int]) -> list[Action]:
    """One pod less: in the rendered set of a pool in the spec, by scaling the set of any other."""
    size = workload.found.replicas - 1
    if workload.group in replicas:
        replicas[workload.group] = size
        return []
    return [Scale(workload.found.ref, workload.found.uid, size, "its pool is not in the spec any more")]


def _others_missing(observed: Observed, sets: tuple[Workload, ...], item: _Leaving) -> str:
    """Why no node may leave: another one is on its way out or in."""
    sizes = {workload.group: workload.found.replicas for workload in sets}
    others = [pod for pod in observed.pods_of(Component.STORE) if pod.name != item.pod.name]
    for pod in others:
        if pod.slot >= sizes.get(pod.group, 0):
            return f"store: {pod.name} is leaving"
        # One that has failed or never ran holds nothing up that leaves for good; a roll stops at it.
        if pod.deleting or not (pod.ready or (item.shrink and is_broken(pod))):
            return f"store: {blocker(pod)}"
    if item.shrink is None and len(others) + 1 < sum(sizes.values()):
        return f"store: {len(others) + 1} of {sum(sizes.values())} nodes exist"
    return ""


def _next(
    plan: StoresPlan, cluster: KVCacheCluster, observed: Observed, item: _Leaving, segment_of: SegmentOf
) -> StoresPlan:
    """The next thing to do about one healthy node that has to leave."""
    pod, state = item.pod, observed.drains.get(item.pod.name)
    if state is not None:
        return _go_on(plan, observed, item, state)
    if not pod.ready:
        return replace(plan, waiting=f"store: {blocker(pod)}")
    if item.drain.mode is DrainMode.DISCARD or _is_last(observed, pod):
        return _let_go(plan, item)
    if leading_master(cluster, observed) is None:
        return replace(plan, waiting=f"store: no master leads, so {pod.name} cannot be drained")
    if pod.name not in observed.segments:
        return replace(plan, waiting=f"store: the leader does not list the segment of {pod.name} yet")
    start = StartDrain(pod.name, pod.uid, segment_of(pod.group, pod.slot))
    event = Emit("DrainStarted", f"objects of {pod.name} move to other nodes, because {item.why}")
    return replace(plan, actions=(*plan.actions, start, event), draining=(*plan.draining, pod.name))


def _go_on(plan: StoresPlan, observed: Observed, item: _Leaving, state: DrainState) -> StoresPlan:
    """A drain was asked for: wait, let the pod go, or say what holds it up."""
    pod, drain = item.pod, item.drain
    late = state.running_s * 1000 >= drain.timeout_ms
    forced = late and drain.on_timeout is DrainTimeout.FORCE
    if state.phase in (DrainPhase.DONE, DrainPhase.UNSUPPORTED) or drain.mode is DrainMode.DISCARD or forced:
        return _let_go(plan, item, _ending(pod, state, forced=forced))
    plan = replace(plan, draining=(*plan.draining, pod.name))
    if drain.on_timeout is DrainTimeout.FORCE or (state.phase is DrainPhase.RUNNING and not late):
        return plan
    ended = "failed" if state.phase is DrainPhase.FAILED else f"takes longer than {drain.timeout_ms // 1000} s"
    detail = f": {state.detail}" if state.detail else ""
    text = f"the drain of {pod.name} {ended}{detail}. Give the store more room, or take the change back, or set drain"
    text += ".onTimeout to Force or drain.mode to Discard in its pool"
    actions = list(plan.actions)
    if state.phase is DrainPhase.FAILED and state.running_s >= RETRY_S:
        actions.append(CancelDrain(pod.name, pod.uid, state.job))
    elif not was_true(observed, "DrainBlocked"):
        actions.append(Emit("DrainBlocked", text, warning=True))
    return replace(plan, actions=tuple(actions), blocked={pod.name: text})


def _ending(pod: ObservedPod, state: DrainState, *, forced: bool) -> Emit:
    if state.phase is DrainPhase.DONE:
        return Emit("DrainCompleted", f"all objects of {pod.name} are elsewhere")
    if state.phase is DrainPhase.UNSUPPORTED:
        return Emit("CapabilityMissing", f"the master has no drain jobs: {pod.name} unmounts, its objects are lost")
    reason = "the drain took too long" if forced else "its pool discards"
    return Emit("DrainPartial", f"{pod.name} goes with objects left on it: {reason}", warning=True)


def _let_go(plan: StoresPlan, item: _Leaving, event: Emit | None = None) -> StoresPlan:
    """Delete the pod, or shrink its set by one; on SIGTERM the node unmounts by itself."""
    replicas = dict(plan.replicas)
    actions: list[Action] = [*plan.actions, *([event] if event else [])]
    if item.shrink is None:
        actions.append(DeletePod(item.pod.name, item.pod.uid, item.why))
    else:
        actions += _shrink(item.shrink, replicas)
    return replace(plan, replicas=replicas, actions=tuple(actions))


def _is_last(observed: Observed, pod: ObservedPod) -> bool:
    """True when no other node could take its objects."""
    return not any(other.ready and other.name != pod.name for other in observed.pods_of(Component.STORE))
