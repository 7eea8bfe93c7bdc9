"""One pass over one cluster: what it is, what it should be → what to do next. Pure; called by `reconcile`.

Every pass decides from scratch. An action that was lost, or done twice, or a pass that ended in its middle, changes
nothing in where the passes arrive: `tests/sim` folds them to completion, cut at every point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator import names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import WORKLOAD_KINDS, Component, Observed
from kvtier_operator.planning.actions import Action, DeletePod, Emit, Plan, SaveLedger
from kvtier_operator.planning.allocation import Allocation
from kvtier_operator.planning.deletion import bid_farewell, finalizer_actions
from kvtier_operator.planning.engines import EnginesPlan, plan_engines
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.leftovers import Leftovers, clear_leftovers
from kvtier_operator.planning.masters import MastersPlan, plan_masters
from kvtier_operator.planning.pace import next_look_s
from kvtier_operator.planning.pods import waiting_events
from kvtier_operator.planning.ports import StorePort
from kvtier_operator.planning.progress import Progress
from kvtier_operator.planning.remembered import was_false
from kvtier_operator.planning.rendering import BuildChildren, Rendering, claim_ports, layouts, render
from kvtier_operator.planning.stages import missing_by_stage
from kvtier_operator.planning.stores import StoresPlan, plan_stores
from kvtier_operator.planning.upkeep import Upkeep, upkeep
from kvtier_operator.planning.wants import block_key, owner_of

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Builders:
    """What a plan is made of and does not decide.

    Attributes:
        revision: name of the revision that a manifest asks for.
        children: see `BuildChildren`.
        status: cluster, observation, progress → the whole status.
    """

    revision: Callable[[KVCacheCluster], str]
    children: BuildChildren
    status: Callable[[KVCacheCluster, Observed, Progress], Status]


def plan(cluster: KVCacheCluster, observed: Observed, builders: Builders) -> Plan:
    """What to do now about one cluster whose manifest is valid.

    Args:
        cluster: as wanted.
        observed: as it is.
        builders: of names, manifests and status.
    """
    if cluster.metadata.deleting:
        return _plan_deletion(cluster, observed, builders)
    decisions = _decide(cluster, observed, builders)
    progress = _progress(decisions)
    status = builders.status(cluster, observed, progress)
    if cluster.paused:
        return Plan(status=status)
    actions = (*finalizer_actions(cluster), *_actions(observed, decisions))
    return Plan(actions, status, next_look_s(cluster, observed, progress, decisions.rendering.ledger))


@dataclass(frozen=True, slots=True)
class _Decisions:
    masters: MastersPlan
    stores: StoresPlan
    engines: EnginesPlan
    rendering: Rendering
    upkeep: Upkeep
    leftovers: Leftovers
    frozen: str


def _decide(cluster: KVCacheCluster, observed: Observed, builders: Builders) -> _Decisions:
    """Each component by itself, then everything that follows from it."""
    missing = missing_by_stage(cluster, observed)
    quorum = missing.get(Stage.COORDINATION, "")
    masters = plan_masters(cluster, observed, quorum)
    stores = plan_stores(cluster, observed, quorum, lambda pool, slot: _segment(cluster, observed, pool, slot))
    before_engines = (Stage.COORDINATION, Stage.MASTERS, Stage.STORE)
    hold = next((missing[stage] for stage in before_engines if stage in missing), "")
    target = builders.revision(cluster)
    engines = plan_engines(cluster, observed, target, hold)
    now, widest = layouts(cluster, masters, stores, engines)
    allocation = claim_ports(cluster, observed, widest, engines)
    if allocation.refused:
        engines = plan_engines(cluster, observed, target, hold or _refusal(allocation))
        now, _ = layouts(cluster, masters, stores, engines)
    rendering = render(cluster, observed, builders.children, engines, now=now, allocation=allocation)
    kept = upkeep(cluster, observed, rendering.children, missing, creating=not allocation.refused)
    leftovers = clear_leftovers(cluster, observed, rendering.wanted, engines, settled=not kept.applies)
    return _Decisions(masters, stores, engines, rendering, kept, leftovers, quorum)


def _actions(observed: Observed, decisions: _Decisions) -> tuple[Action, ...]:
    """In the order of execution: who leads, then ports, then less of the old, then the new, then what may go."""
    masters, stores, engines = decisions.masters, decisions.stores, decisions.engines
    rendering = decisions.rendering
    deletions = [action for action in masters.actions if isinstance(action, DeletePod)]
    actions: list[Action] = [action for action in masters.actions if action not in deletions]
    if rendering.ledger != observed.ledger:
        actions.append(SaveLedger(rendering.ledger))
    actions += engines.scales
    actions += decisions.upkeep.applies
    actions += deletions
    actions += stores.actions
    actions += engines.deletes
    actions += decisions.leftovers.actions
    actions += engines.events
    actions += waiting_events(observed)
    if rendering.allocation.refused and not was_false(observed, "PortsAllocated"):
        reason = "PortTaken" if rendering.allocation.taken else "PortRangeExhausted"
        actions.append(Emit(reason, _refusal(rendering.allocation), warning=True))
    return tuple(actions)


def _progress(decisions: _Decisions) -> Progress:
    stores, engines, kept = decisions.stores, decisions.engines, decisions.upkeep
    allocation = decisions.rendering.allocation
    waits = (kept.waiting, decisions.masters.waiting, stores.waiting, engines.waiting, decisions.leftovers.waiting)
    return Progress(
        stage=kept.stage,
        waiting_for=tuple(dict.fromkeys(filter(None, waits))),
        rollout=engines.progress,
        draining=stores.draining,
        blocked_drains=stores.blocked,
        exhausted=tuple(str(want.key) for want in allocation.exhausted),
        missing_ports=allocation.missing,
        taken_ports=_taken(allocation),
        conflicts=kept.conflicts,
        changes=tuple(apply.ref for apply in kept.applies if apply.ref.kind in WORKLOAD_KINDS),
        frozen=decisions.frozen if decisions.frozen in waits[1:4] else "",
    )


def _plan_deletion(cluster: KVCacheCluster, observed: Observed, builders: Builders) -> Plan:
    farewell = bid_farewell(cluster, observed)
    waits = (farewell.waiting,) if farewell.waiting else ()
    progress = Progress(waiting_for=waits, deleting=farewell.component)
    status = builders.status(cluster, observed, progress)
    if cluster.paused:
        return Plan(status=status)
    return Plan(farewell.actions, status, next_look_s(cluster, observed, progress, observed.ledger))


def _segment(cluster: KVCacheCluster, observed: Observed, pool: str, slot: int) -> str:
    """A storage node's segment bears its host and its label port."""
    workload = names.store_set(cluster.name, pool)
    host = names.pod_host(names.pod_name(workload, slot), workload, cluster.metadata.namespace)
    entry = observed.ledger.entries.get(block_key(owner_of(cluster), Component.STORE, pool, slot=slot))
    return f"{host}:{entry.block.port(StorePort.LABEL)}" if entry else host


def _refusal(allocation: Allocation) -> str:
    """Why no ports were given, in one sentence."""
    if allocation.taken:
        return "ports: " + "; ".join(_taken(allocation))
    owners = ", ".join(str(want.key) for want in allocation.exhausted)
    return f"ports: spec.transport.ports is {allocation.missing} too small for {owners}"


def _taken(allocation: Allocation) -> tuple[str, ...]:
    return tuple(
        f"{one.key} needs {one.block}, which {one.holder} of {one.holder.cluster} has" for one in allocation.taken
    )
