"""Which stages of a cluster are ready, judged by its pods and masters. Pure; called by `plan` and status.

A stage gates only what does not exist yet. What exists is kept right whatever happens before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Observed
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.masters import leading_master


def missing_by_stage(cluster: KVCacheCluster, observed: Observed) -> Mapping[Stage, str]:
    """What each stage still lacks, in words; a stage that lacks nothing is absent."""
    checks = {
        Stage.COORDINATION: missing_quorum(cluster, observed),
        Stage.MASTERS: _missing_leader(cluster, observed),
        Stage.STORE: _missing_nodes(cluster, observed),
        Stage.ENGINES: _missing_engines(cluster, observed),
        Stage.ROUTER: _missing_router(cluster, observed),
    }
    return {stage: text for stage, text in checks.items() if text}


def missing_quorum(cluster: KVCacheCluster, observed: Observed) -> str:
    """Why the managed etcd cannot decide anything; empty = it can, or it is not ours.

    The quorum is that of the wanted size: a size that follows what is left would let a minority decide.
    """
    managed = cluster.coordination.managed
    if managed is None or not cluster.uses_store:
        return ""
    ready, needed = sum(pod.ready for pod in observed.pods_of(Component.ETCD)), managed.quorum
    return "" if ready >= needed else f"etcd: {ready} of {managed.replicas} members are ready, {needed} are needed"


def _missing_leader(cluster: KVCacheCluster, observed: Observed) -> str:
    if not cluster.uses_store or leading_master(cluster, observed) is not None:
        return ""
    ready = sum(pod.ready for pod in observed.pods_of(Component.MASTER))
    return f"masters: {ready} of {cluster.master.replicas} are ready, none of them leads yet"


def _missing_nodes(cluster: KVCacheCluster, observed: Observed) -> str:
    if not cluster.uses_store:
        return ""
    for pool in cluster.pools:
        pods = observed.pods_of(Component.STORE, pool.name)
        if pool.replicas and not any(pod.ready or pod.name in observed.segments for pod in pods):
            return f"store pool {pool.name}: none of {pool.replicas} nodes is mounted"
    return ""


def _missing_engines(cluster: KVCacheCluster, observed: Observed) -> str:
    for role in cluster.roles:
        if role.replicas and not any(pod.ready for pod in observed.pods_of(Component.ENGINE, role.name)):
            return f"role {role.name}: none of {role.replicas} engines is ready"
    return ""


def _missing_router(cluster: KVCacheCluster, observed: Observed) -> str:
    wanted = cluster.router_replicas
    if not wanted or any(pod.ready for pod in observed.pods_of(Component.ROUTER)):
        return ""
    return f"router: none of {wanted} pods is ready"
