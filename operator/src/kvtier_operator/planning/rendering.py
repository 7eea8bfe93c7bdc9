"""From decisions to manifests: which pods there are now, the ports of all that may come, and the children. Pure.

Two layouts meet here. *Now* says how many pods each set has at this moment; *widest* how many it has at the end of a
rollout or had before a scale-in. Ports and slot settings are those of the widest, so that a range too small is found
before the first pod, and a pod finds its settings before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Manifest, ObjectRef, Observed
from kvtier_operator.planning.allocation import Allocation, adopt, release_absent
from kvtier_operator.planning.engines import EnginesPlan
from kvtier_operator.planning.in_use import live_keys, stated_blocks
from kvtier_operator.planning.layout import EngineSet, Layout
from kvtier_operator.planning.ledger import BlockKey, Ledger
from kvtier_operator.planning.masters import MastersPlan
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.stores import StoresPlan
from kvtier_operator.planning.upkeep import Children, reference
from kvtier_operator.planning.wants import allocate_blocks, owner_of
from kvtier_operator.planning.workloads import is_ours, workloads_of

BuildChildren = Callable[[KVCacheCluster, Layout, Mapping[BlockKey, PortBlock], frozenset[str]], Children]
"""Cluster, layout, blocks by owner, optional kinds that exist → every child by stage."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What should exist.

    Attributes:
        children: to be kept right now.
        wanted: all that must not be cleared away; more than ``children`` while something waits for its time.
        ledger: with the blocks of all of them.
        allocation: of the widest layout; when it is refused, nothing new is made.
    """

    children: Children
    wanted: frozenset[ObjectRef]
    ledger: Ledger
    allocation: Allocation


def layouts(
    cluster: KVCacheCluster, masters: MastersPlan, stores: StoresPlan, engines: EnginesPlan
) -> tuple[Layout, Layout]:
    """Now, and widest."""
    now = Layout(
        etcd=cluster.etcd_replicas,
        masters=masters.replicas,
        pools=stores.replicas,
        engines=engines.sets,
        router=cluster.router_replicas,
    )
    if not engines.rendered:
        return now, now
    wanted = {role.name: role.replicas for role in cluster.roles}
    wide = tuple(replace(one, replicas=max(one.replicas, wanted[one.role])) for one in engines.sets)
    return now, replace(now, engines=wide)


def as_it_is(cluster: KVCacheCluster, observed: Observed, now: Layout) -> Layout:
    """The layout, with nothing in it that does not exist yet."""

    def capped(name: str, wanted: int, kind: str = "StatefulSet") -> int:
        found = observed.objects.get(ObjectRef(kind, name))
        return min(wanted, found.replicas) if found is not None else 0

    return Layout(
        etcd=capped(names.etcd_set(cluster.name), now.etcd),
        masters=capped(names.master_set(cluster.name), now.masters),
        pools={pool: capped(names.store_set(cluster.name, pool), size) for pool, size in now.pools.items()},
        engines=tuple(
            EngineSet(one.role, one.revision, capped(_engine_set(cluster, one), one.replicas)) for one in now.engines
        ),
        router=capped(names.router_deployment(cluster.name), now.router, "Deployment"),
    )


def claim_ports(cluster: KVCacheCluster, observed: Observed, widest: Layout, engines: EnginesPlan) -> Allocation:
    """Blocks for every pod that may come; those of revisions that may grow again are held."""
    owner = owner_of(cluster)
    live = live_keys(cluster, widest, observed)
    if engines.progress.running:
        lanes = {one.lane for one in workloads_of(cluster, observed, Component.ENGINE)}
        live |= {key for key in observed.ledger.entries if key.cluster == owner and key.lane in lanes - {""}}
    ours = [found for found in observed.objects.values() if is_ours(cluster, found)]
    stated = {**observed.stated, **stated_blocks(owner, ours, observed.pods)}
    present = observed.ledger.clusters - observed.gone
    ledger = adopt(release_absent(observed.ledger, present, observed.now), stated)
    return allocate_blocks(cluster, widest, ledger, live, observed.now)


def render(
    cluster: KVCacheCluster,
    observed: Observed,
    build: BuildChildren,
    engines: EnginesPlan,
    *,
    now: Layout,
    allocation: Allocation,
) -> Rendering:
    """Children for the layout of now, with the ports of the widest, so that slots have settings before they have pods.

    Args:
        cluster: the owner.
        observed: as it is.
        build: the builders.
        engines: whether the target revision may be made.
        now: pods at this moment.
        allocation: of the widest layout; refused = only what exists is rendered, with the blocks that it has.
    """
    ledger, blocks = allocation.ledger, allocation.blocks
    if allocation.refused:
        now = as_it_is(cluster, observed, now)
        held = allocate_blocks(cluster, now, ledger, live_keys(cluster, now, observed), observed.now)
        if held.refused:
            # Not even what exists has its ports: leave everything as it stands.
            return Rendering({}, frozenset(observed.objects), ledger, allocation)
        ledger, blocks = held.ledger, held.blocks
    children = build(cluster, now, blocks, observed.optional_kinds)
    wanted = frozenset(reference(item) for items in children.values() for item in items)
    if not engines.rendered:
        children = {stage: _without(engines.revision.name, items) for stage, items in children.items()}
    return Rendering(children, wanted, ledger, allocation)


def _engine_set(cluster: KVCacheCluster, one: EngineSet) -> str:
    return names.engine_set(cluster.name, one.role, one.revision.name)


def _without(revision: str, manifests: tuple[Manifest, ...]) -> tuple[Manifest, ...]:
    return tuple(item for item in manifests if item["metadata"].get("labels", {}).get(labels.REVISION) != revision)
