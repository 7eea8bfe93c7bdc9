"""Which workloads a cluster has at one moment of its life, and how many pods each. Pure.

Plans decide it, builders render it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.planning.revision import Revision


class Stage(IntEnum):
    """Start-up order: the objects of a stage are first made when the stages before it are ready.

    What exists is kept right whatever happened to earlier stages: losing the leader never takes an engine away.
    """

    FOUNDATION = 0
    """ServiceAccounts, NetworkPolicies, PDBs, Services, ConfigMaps."""
    COORDINATION = 1
    MASTERS = 2
    STORE = 3
    ENGINES = 4
    ROUTER = 5
    MONITORING = 6


@dataclass(frozen=True, slots=True)
class EngineSet:
    """Engines of one role in one revision."""

    role: str
    revision: Revision
    replicas: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Wanted pods by workload.

    Attributes:
        pools: replicas by pool name; while a node drains, still with it.
        engines: sets of the newest revision only; older ones are scaled, never rendered again.
    """

    etcd: int = 0
    masters: int = 0
    pools: Mapping[str, int] = field(default_factory=dict)
    engines: tuple[EngineSet, ...] = ()
    router: int = 0


def whole_layout(cluster: KVCacheCluster, *revisions: Revision) -> Layout:
    """All pods that the manifest asks for, engines once in each of these revisions."""
    return Layout(
        etcd=cluster.etcd_replicas,
        masters=cluster.master_replicas,
        pools={pool.name: pool.replicas for pool in cluster.pools},
        engines=tuple(EngineSet(role.name, one, role.replicas) for one in revisions for role in cluster.roles),
        router=cluster.router_replicas,
    )
