"""Which blocks of ports a cluster needs, on Kubernetes and under `kvtier up`. Pure; called by plans and runtimes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component
from kvtier_operator.planning.allocation import Allocation, allocate
from kvtier_operator.planning.layout import Layout, whole_layout
from kvtier_operator.planning.ledger import BlockKey, Ledger, Want, owner
from kvtier_operator.planning.ports import ETCD_PORTS, MASTER_PORTS, ROUTER_PORTS, STORE_PORTS, engine_ports
from kvtier_operator.planning.revision import Revision

ALL_PODS = -1
"""Slot of a block that every pod of a group uses."""

LANES = ("A", "B")


def owner_of(cluster: KVCacheCluster) -> str:
    """The cluster's name in ledgers."""
    return owner(cluster.metadata.namespace, cluster.name, cluster.metadata.uid)


def block_key(cluster: str, component: Component, group: str = "", lane: str = "", slot: int = 0) -> BlockKey:
    """Owner of the block that a pod uses.

    Args:
        cluster: as `owner_of` spells it.
        component: what the pod is for.
        group: its pool or role; empty for others.
        lane: of an engine.
        slot: its ordinal; ignored where all pods of the group use one block.
    """
    match component:
        case Component.STORE:
            return BlockKey(cluster, f"store-{group}", "", slot)
        case Component.ENGINE:
            return BlockKey(cluster, group, lane, slot)
        case _:
            return BlockKey(cluster, str(component), "", ALL_PODS)


def api_key(cluster: str, group: str) -> BlockKey:
    """Owner of the HTTP port that the user chose for a role."""
    return BlockKey(cluster, f"api/{group}", "", ALL_PODS)


def local_key(cluster: str, component: Component, group: str = "", slot: int = 0) -> BlockKey:
    """Owner of the block that a process of `kvtier up` uses: each its own."""
    if component in (Component.STORE, Component.ENGINE):
        return block_key(cluster, component, group, LANES[0], slot)
    return BlockKey(cluster, str(component), "", slot)


def wants_of(cluster: KVCacheCluster, layout: Layout) -> tuple[Want, ...]:
    """Blocks that the workloads of a layout need on Kubernetes.

    etcd, masters and routers have addresses or nodes of their own: one block for all pods of the group. Storage nodes
    and engines may share a node: one a slot. On the host network the roles' HTTP ports, which the user chose, count as
    well; routers have addresses of their own there too.
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
    groups = (
        (Component.ETCD, "", cluster.etcd_replicas, ETCD_PORTS),
        (Component.MASTER, "", cluster.master_replicas, MASTER_PORTS),
        *((Component.STORE, pool.name, pool.replicas, STORE_PORTS) for pool in cluster.pools),
        *((Component.ENGINE, role.name, role.replicas, engine_ports(role).width) for role in cluster.roles),
        (Component.ROUTER, "", cluster.router_replicas, ROUTER_PORTS),
    )
    return tuple(
        Want(local_key(owner_of(cluster), component, group, slot), width)
        for component, group, replicas, width in groups
        for slot in range(replicas)
    )


def allocate_blocks(
    cluster: KVCacheCluster, layout: Layout, ledger: Ledger, live: frozenset[BlockKey], now: float
) -> Allocation:
    """Blocks for every workload of the layout; see `allocate`. ``live`` comes from `in_use.live_keys`."""
    return allocate(ledger, cluster.transport.ports, owner_of(cluster), wants_of(cluster, layout), live=live, now=now)


def allocate_locally(cluster: KVCacheCluster) -> Allocation:
    """Blocks for every process of `kvtier up`: the same manifest always gets the same ports."""
    return allocate(
        Ledger(), cluster.transport.ports, owner_of(cluster), local_wants(cluster), live=frozenset(), now=0.0
    )


def ports_needed(cluster: KVCacheCluster) -> int:
    """Length of the range that the cluster needs at most: in a rollout, when every engine has a block in both lanes."""
    widest = whole_layout(cluster, *(Revision("", lane) for lane in LANES))
    return sum(want.width for want in wants_of(cluster, widest) if want.at is None)


def _whole_groups(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    widths = (
        (Component.ETCD, layout.etcd, ETCD_PORTS),
        (Component.MASTER, layout.masters, MASTER_PORTS),
        (Component.ROUTER, layout.router, ROUTER_PORTS),
    )
    for component, replicas, width in widths:
        if replicas:
            yield Want(block_key(owner_of(cluster), component), width)


def _store_wants(cluster: KVCacheCluster, pools: Mapping[str, int]) -> Iterator[Want]:
    for pool, replicas in pools.items():
        for slot in range(replicas):
            yield Want(block_key(owner_of(cluster), Component.STORE, pool, slot=slot), STORE_PORTS)


def _engine_wants(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    roles = {role.name: role for role in cluster.roles}
    name = owner_of(cluster)
    for engines in layout.engines:
        width = engine_ports(roles[engines.role]).width
        for slot in range(engines.replicas):
            yield Want(block_key(name, Component.ENGINE, engines.role, engines.revision.lane, slot), width)


def _api_wants(cluster: KVCacheCluster, layout: Layout) -> Iterator[Want]:
    busy = {engines.role for engines in layout.engines if engines.replicas}
    for role in cluster.roles:
        if role.name in busy:
            yield Want(api_key(owner_of(cluster), role.name), cluster.api_width(role), at=role.port)
