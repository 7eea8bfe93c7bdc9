"""What of a manifest cannot exist on one machine without Kubernetes. Pure; used by `up`."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_operator.api import (
    DeletionPolicy,
    Dialect,
    Drain,
    Images,
    KVCacheCluster,
    NetworkPolicies,
    Observability,
    PodOptions,
    Role,
    Rollout,
    StorePool,
)

_PLAIN_ROLE = {field: Role.__dataclass_fields__[field].default for field in ("shm_bytes", "grace_ms")}


def refusals(cluster: KVCacheCluster) -> tuple[str, ...]:
    """Why this machine cannot run the cluster at all; one sentence each."""
    if cluster.dialect is Dialect.KVTIER:
        return ()
    why = "its engines and router (xllm, xllm_master_serving) come in images and need accelerators"
    fix = "apply the manifest to Kubernetes, or write Kvtier and roles of type Fused"
    return (f"spec.engine.dialect = '{cluster.dialect}': {why}; {fix}",)


def without_effect(cluster: KVCacheCluster) -> tuple[str, ...]:
    """Fields that the manifest sets and that only a Kubernetes cluster can honour, as paths."""
    return tuple(_without_effect(cluster))


def _without_effect(cluster: KVCacheCluster) -> Iterator[str]:
    managed = cluster.coordination.managed
    stated = {
        "spec.paused": cluster.paused,
        "spec.images": cluster.images != Images(),
        "spec.coordination.etcd.managed.storage": managed and (managed.storage_bytes or managed.storage_class),
        "spec.coordination.etcd.managed.pod": managed and managed.pod != PodOptions(),
        "spec.master.pod": cluster.master.pod != PodOptions(),
        "spec.transport.hostNetwork": cluster.transport.host_network,
        "spec.rollout": cluster.rollout != Rollout(),
        "spec.security.networkPolicy": cluster.network_policies != NetworkPolicies(),
        "spec.observability": cluster.observability != Observability(),
        "spec.deletion": cluster.deletion is not DeletionPolicy.IMMEDIATE,
    }
    yield from (path for path, is_stated in stated.items() if is_stated)
    for index, pool in enumerate(cluster.pools):
        yield from (f"spec.store.pools[{index}].{name}" for name in _of_pool(pool))
    for index, role in enumerate(cluster.roles):
        yield from (f"spec.roles[{index}].{name}" for name in _of_role(role))


def _of_pool(pool: StorePool) -> Iterator[str]:
    if pool.drain != Drain():
        yield "drain"
    if pool.pod != PodOptions():
        yield "pod"


def _of_role(role: Role) -> Iterator[str]:
    if role.shm_bytes != _PLAIN_ROLE["shm_bytes"]:
        yield "shm"
    if role.grace_ms != _PLAIN_ROLE["grace_ms"]:
        yield "termination"
    if role.pod != PodOptions():
        yield "pod"
