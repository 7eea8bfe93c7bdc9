"""Says what a world that has settled still lacks of what its spec asks for. Pure; computed from the spec alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import WORKLOAD_KINDS, Component, ObjectRef
from kvtier_operator.testing.world import World
from kvtier_operator.testing.world_records import template_of


def unfinished(world: World, revision: str) -> list[str]:
    """Everything that is not as the spec says, in words; none when the cluster is complete.

    Args:
        world: that has settled.
        revision: that the spec asks for.
    """
    checks = (_workloads(world, revision), _pods(world), _leader(world), _rest(world, revision))
    return [text for check in checks for text in check]


def wanted_workloads(cluster: KVCacheCluster, revision: str) -> Mapping[ObjectRef, int]:
    """Replicas of every workload of a cluster at rest; sets of the former revision apart."""
    sets: dict[str, int] = {}
    if cluster.uses_store:
        managed = cluster.coordination.managed
        if managed is not None:
            sets[names.etcd_set(cluster.name)] = managed.replicas
        sets[names.master_set(cluster.name)] = cluster.master.replicas
        sets |= {names.store_set(cluster.name, pool.name): pool.replicas for pool in cluster.pools}
    sets |= {names.engine_set(cluster.name, role.name, revision): role.replicas for role in cluster.roles}
    wanted = {ObjectRef("StatefulSet", name): size for name, size in sets.items()}
    if cluster.router is not None:
        wanted[ObjectRef("Deployment", names.router_deployment(cluster.name))] = cluster.router.replicas
    return wanted


def _workloads(world: World, revision: str) -> Iterator[str]:
    wanted = wanted_workloads(world.cluster, revision)
    for ref, size in wanted.items():
        if ref not in world.objects:
            yield f"{ref} is absent"
        elif (found := world.objects[ref].live["spec"]["replicas"]) != size:
            yield f"{ref} has {found} replicas instead of {size}"
    for ref, item in world.objects.items():
        if ref.kind in WORKLOAD_KINDS and ref not in wanted and item.live["spec"]["replicas"]:
            yield f"{ref} still has replicas"


def _pods(world: World) -> Iterator[str]:
    slots = {
        f"{ref.name}-{slot}": template_of(item.live)
        for ref, item in world.objects.items()
        if ref.kind in WORKLOAD_KINDS
        for slot in range(item.live["spec"]["replicas"])
    }
    for name in slots.keys() ^ world.pods.keys():
        yield f"{name} is {'absent' if name in slots else 'left over'}"
    for name, pod in world.pods.items():
        if not pod.ready:
            yield f"{name} is not ready"
        if name in slots and pod.template != slots[name] and pod.component is not Component.ENGINE:
            yield f"{name} has an outdated template"


def _leader(world: World) -> Iterator[str]:
    labelled = [pod.name for pod in world.pods.values() if pod.leader]
    leading = [world.leading.name] if world.leading is not None else []
    if world.cluster.uses_store and world.cluster.coordination.uses_etcd and labelled != leading:
        yield f"{labelled} are labelled leader, {leading} leads"


def _rest(world: World, revision: str) -> Iterator[str]:
    """Nothing of what went before is left, but one former revision at zero replicas."""
    yield from (f"the drain of {name} is left over" for name in world.drains)
    groups = {role.name for role in world.cluster.roles} | {pool.name for pool in world.cluster.pools}
    former = set()
    needless = set() if world.cluster.uses_store else {Component.ETCD, Component.MASTER, Component.STORE}
    for ref, item in world.objects.items():
        own = item.live["metadata"].get("labels", {})
        if own.get(labels.COMPONENT) in needless:
            yield f"{ref} is left over, nobody uses the store"
        if (name := own.get(labels.REVISION, revision)) != revision:
            former.add(name)
        elif (own.get(labels.ROLE) or own.get(labels.POOL) or next(iter(groups))) not in groups:
            yield f"{ref} is left over"
    if len(former) > 1:
        yield f"revisions {former} are left over"
