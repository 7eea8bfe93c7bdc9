"""Which blocks of ports a cluster needs, and who still uses the ones it had. Pure; called by plans and `kvtier up`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster, Role
from kvtier_operator.observed import Component, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.allocation import Adoption, Allocation, adopt, allocate
from kvtier_operator.planning.layout import Layout
from kvtier_operator.planning.ledger import BlockKey, Ledger, Want, owner
from kvtier_operator.planning.ledger_data import read_slots
from kvtier_operator.planning.ports import (
    ETCD_PORTS,
    MASTER_PORTS,
    ROUTER_PORTS,
    STORE_PORTS,
    PortBlock,
    engine_ports,
)

ALL_PODS = -1
"""Slot of a block that every pod of a group uses."""

LANES = ("A", "B")
_WORKLOADS = frozenset({"StatefulSet", "Deployment"})


def owner_of(cluster: KVCacheCluster) -> str:
    """The cluster's name in ledgers."""
    return owner(cluster.metadata.namespace, cluster.name, cluster.metadata.uid)


def block_key(cluster: KVCacheCluster, component: Component, group: str = "", lane: str = "", slot: int = 0) -> BlockKey:
    """Owner of the block that a pod of the cluster uses.

    Args:
        cluster: any.
        component: what the pod is for.
        group: its pool or role; empty for others.
        lane: of an engine.
        slot: its ordinal; ignored where all pods of the group use one block.
    """
    if component in (Component.STORE, Component.ENGINE):
        return _slot_key(cluster, component, group, lane, slot)
    return _slot_key(cluster, component, "", "", ALL_PODS)


def local_key(cluster: KVCacheCluster, component: Component, group: str = "", slot: int = 0) -> BlockKey:
    """Owner of the block that a process of `kvtier up` uses: each its own."""
    return _slot_key(cluster, component, group, LANES[0] if component is Component.ENGINE else "", slot)


def _slot_key(cluster: KVCacheCluster, component: Component, group: str, lane: str, slot: int) -> BlockKey:
    names = {Component.STORE: f"store-{group}", Component.ENGINE: group}
    return BlockKey(owner_of(cluster), names.get(component, str(component)), lane, slot)


def wants_of(cluster: KVCacheCluster, layout: Layout) -> tuple[Want, ...]:
    """Blocks that the workloads of a layout need on Kubernetes.

    etcd, masters and routers have addresses or nodes of their own: one block for all pods of the group. Storage nodes
    and engines may share a node: one a slot. On the host network the HTTP ports that the user chose count as well.
    """
    return tuple(
        chain(
            _whole_groups(cluster, layout),
            _store_wants(cluster, layout.pools),
            _engine_wants(cluster, layout),
            _api_wants(cluster, layout) if cluster.transport.host_network else (),
        )
    )


def local_wants(cluster: KVCacheCluster) -> tuple[Want, ...]:
    """Blocks of every process of `kvtier up`, where all of them share one machine."""
    managed = cluster.coordination.managed
    groups = (
        (Component.ETCD, "", managed.replicas if managed and cluster.uses_store else 0, ETCD_PORTS),
        (Component.MASTER, "", cluster.master.replicas if cluster.uses_store else 0, MASTER_PORTS),
        *((Component.STORE, pool.name, pool.replicas, STORE_PORTS) for pool in cluster.pools),
        *((Component.ENGINE, role.name, role.replicas, engine_ports(role).width) for role in cluster.roles),
        (Component.ROUTER, "", cluster.router.replicas if cluster.router else 0, ROUTER_PORTS),
    )
    return tuple(
        Want(local_key(cluster, component, group, slot), width)
        for component, group, replicas, width in groups
        for slot in range(replicas)
    )


def allocate_blocks(
    cluster: KVCacheCluster, layout: Layout, ledger: Ledger, live: frozenset[BlockKey], now: float
) -> Allocation:
    """Blocks for every workload of the layout; see `allocate`. ``live`` comes from `live_keys`."""
    return allocate(ledger, cluster.transport.ports, owner_of(cluster), wants_of(cluster, layout), live, now)


def allocate_locally(cluster: KVCacheCluster) -> Allocation:
    """Blocks for every process of `kvtier up`: the same manifest always gets the same ports."""
    return allocate(Ledger(), cluster.transport.ports, owner_of(cluster), local_wants(cluster), frozenset(), now=0.0)


def live_keys(cluster: KVCacheCluster, layout: Layout, observed: Observed) -> frozenset[BlockKey]:
    """Owners whose block may be in use: of pods that exist, and of pods that an existing workload may make again.

    The HTTP port of a role counts as in use by pods of other revisions only, since a wanted one is kept anyway and a
    former one must go some day.
    """
    lanes = _lanes(observed)
    sets = (_keys_of_workload(cluster, found) for found in observed.objects.values() if _is_ours(cluster, found))
    pods = (_keys_of_pod(cluster, pod, lanes) for pod in observed.pods)
    apis = _keys_of_old_apis(cluster, layout, observed)
    return frozenset(chain(chain.from_iterable(sets), chain.from_iterable(pods), apis))


def adopt_blocks(cluster: KVCacheCluster, layout: Layout, observed: Observed) -> Adoption:
    """The observed ledger, completed with blocks that living workloads say they use (annotation of the set).

    Makes a lost ledger again; changes nothing when the ledger knows everything, as it always should.
    """
    live = live_keys(cluster, layout, observed)
    found: dict[BlockKey, PortBlock] = {}
    for workload in observed.objects.values():
        if not _is_ours(cluster, workload):
            continue
        annotations = (workload.live.get("metadata") or {}).get("annotations") or {}
        for slot, block in read_slots(str(annotations.get(labels.PORT_BLOCK, ""))).items():
            component, group, lane = _place_of(workload)
            key = block_key(cluster, component, group, lane, slot)
            if key in live:
                found[key] = block
    return adopt(observed.ledger, found)


def _whole_groups(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    widths = (
        (Component.ETCD, layout.etcd, ETCD_PORTS),
        (Component.MASTER, layout.masters, MASTER_PORTS),
        (Component.ROUTER, layout.router, ROUTER_PORTS),
    )
    for component, replicas, width in widths:
        if replicas:
            yield Want(block_key(cluster, component), width)


def _store_wants(cluster: KVCacheCluster, pools: Mapping[str, int]) -> Iterator[Want]:
    for pool, replicas in pools.items():
        for slot in range(replicas):
            yield Want(block_key(cluster, Component.STORE, pool, "", slot), STORE_PORTS)


def _engine_wants(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    roles = {role.name: role for role in cluster.roles}
    for engines in layout.engines:
        width = engine_ports(roles[engines.role]).width
        for slot in range(engines.replicas):
            yield Want(block_key(cluster, Component.ENGINE, engines.role, engines.revision.lane, slot), width)


def _api_wants(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    busy = {engines.role for engines in layout.engines if engines.replicas}
    for role in cluster.roles:
        if role.name in busy:
            yield Want(_api_key(cluster, role), 1, at=role.port)
    if cluster.router is not None and layout.router:
        yield Want(BlockKey(owner_of(cluster), "api/router", "", ALL_PODS), 1, at=cluster.router.port)


def _api_key(cluster: KVCacheCluster, role: Role) -> BlockKey:
    return BlockKey(owner_of(cluster), f"api/{role.name}", "", ALL_PODS)


def _is_ours(cluster: KVCacheCluster, found: ObservedObject) -> bool:
    return found.ref.kind in _WORKLOADS and found.owner_uid == cluster.metadata.uid


def _place_of(workload: ObservedObject) -> tuple[Component, str, str]:
    """Component, group and lane of a workload of ours."""
    component = Component(workload.labels[labels.COMPONENT])
    group = workload.labels.get(labels.ROLE) or workload.labels.get(labels.POOL) or ""
    return component, group, workload.labels.get(labels.LANE, "")


def _keys_of_workload(cluster: KVCacheCluster, workload: ObservedObject) -> Iterator[BlockKey]:
    component, group, lane = _place_of(workload)
    for slot in range(workload.replicas):
        yield block_key(cluster, component, group, lane, slot)


def _lanes(observed: Observed) -> Mapping[str, str]:
    """Lanes by revision, of the engine sets that exist."""
    return {
        found.labels[labels.REVISION]: found.labels[labels.LANE]
        for found in observed.objects.values()
        if labels.REVISION in found.labels and labels.LANE in found.labels
    }


def _keys_of_pod(cluster: KVCacheCluster, pod: ObservedPod, lanes: Mapping[str, str]) -> Iterator[BlockKey]:
    """One; of an engine whose set is gone, in each lane, because either may be its."""
    unknown = LANES if pod.component is Component.ENGINE else ("",)
    for lane in (lanes[pod.revision],) if pod.revision in lanes else unknown:
        yield block_key(cluster, pod.component, pod.group, lane, pod.slot)


def _keys_of_old_apis(cluster: KVCacheCluster, layout: Layout, observed: Observed) -> Iterator[BlockKey]:
    newest = {engines.revision.name for engines in layout.engines}
    old = {pod.group for pod in observed.pods_of(Component.ENGINE) if pod.revision not in newest}
    for role in cluster.roles:
        if role.name in old:
            yield _api_key(cluster, role)
