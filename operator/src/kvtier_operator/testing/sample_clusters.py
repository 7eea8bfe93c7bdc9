"""KVCacheClusters as records, with defaults: what tests of plans start from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import (
    Coordination,
    Dialect,
    Drain,
    Durability,
    Images,
    KVCacheCluster,
    ManagedEtcd,
    Master,
    Metadata,
    Model,
    PortRange,
    Protocol,
    Role,
    RoleType,
    Router,
    StoreKind,
    StorePool,
    Tiers,
    Transport,
)

UID = "uid-of-the-cluster"


def sample_role(
    name: str = "engine", replicas: int = 2, kind: RoleType = RoleType.FUSED, *, store: bool = True
) -> Role:
    """Engines of one role."""
    tiers = Tiers(
        device_bytes=1 << 20,
        device_memory_fraction=0.9,
        host_blocks_factor=2.0,
        store_enabled=store,
        prefetch_batch=8,
        prefetch_timeout_ms=0,
    )
    return Role(name, kind, replicas, tensor=1, port=9000, tiers=tiers, settings={})


def sample_pool(name: str = "dram", replicas: int = 2, drain: Drain | None = None) -> StorePool:
    """Storage nodes of one pool."""
    return StorePool(name, StoreKind.KVTIER, replicas, segment_bytes=1 << 30, drain=drain or Drain())


def sample_cluster(
    *,
    roles: Sequence[Role] = (),
    pools: Sequence[StorePool] | None = None,
    masters: int = 3,
    etcd: int = 3,
    images: Images | None = None,
    **changes: Any,
) -> KVCacheCluster:
    """A cluster that exists in the API server: three masters over a managed etcd, two storage nodes, two engines.

    Args:
        roles: empty = one Fused role of two engines.
        pools: None = one of two nodes.
        masters: replicas.
        etcd: members of the managed etcd; 0 = none.
        images: of the pods.
        changes: further fields of the record.
    """
    roles = tuple(roles) or (sample_role(),)
    split = any(role.type is not RoleType.FUSED for role in roles)
    cluster = KVCacheCluster(
        name="kv",
        master=Master(masters, lease_ttl_ms=5000, client_ttl_ms=10000, durability=_durability(etcd)),
        pools=tuple(pools) if pools is not None else (sample_pool(),),
        transport=Transport(Protocol.TCP, shared_memory=False, ports=PortRange(20000, 8000)),
        model=Model(uri="pvc://models/m", id="m"),
        roles=roles,
        metadata=Metadata(namespace="default", uid=UID, generation=1),
        images=images or Images(),
        coordination=Coordination(managed=ManagedEtcd(etcd) if etcd else None),
        dialect=Dialect.XLLM if split else Dialect.KVTIER,
        router=Router() if split else None,
    )
    return replace(cluster, **changes)


def split_roles(prefill: int, decode: int) -> tuple[Role, Role]:
    """Roles that serve only together."""
    return (
        sample_role("prefill", prefill, RoleType.PREFILL),
        replace(sample_role("decode", decode, RoleType.DECODE), port=9001),
    )


def changed(cluster: KVCacheCluster, **changes: Any) -> KVCacheCluster:
    """The cluster after the user wrote another spec: its generation is one more."""
    metadata = replace(cluster.metadata, generation=cluster.metadata.generation + 1)
    return replace(cluster, **{"metadata": metadata, **changes})


def approved(cluster: KVCacheCluster, revision: str) -> KVCacheCluster:
    """The cluster with an approval of one revision."""
    annotations = dict(cluster.metadata.annotations) | {labels.APPROVE: revision}
    return replace(cluster, metadata=replace(cluster.metadata, annotations=annotations))


def _durability(etcd: int) -> Durability:
    return Durability.OPLOG if etcd else Durability.NONE
