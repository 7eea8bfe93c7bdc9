"""Few and small children for simulations of plans: the same names, labels and stages as the real builders. Pure.

A simulation folds thousands of passes; templates in full would only make it slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Manifest, Observed
from kvtier_operator.planning.layout import Layout, Stage
from kvtier_operator.planning.ledger import BlockKey
from kvtier_operator.planning.masters import leading_master
from kvtier_operator.planning.plan import Builders
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.progress import Progress
from kvtier_operator.planning.upkeep import Children
from kvtier_operator.resources.objects.manifests import manifest, selector, stamp


def sketch_revision(cluster: KVCacheCluster) -> str:
    """The engine's image, the roles' names, and whether they use the store."""
    parts = (cluster.images.engine or "v1", *(role.name[0] for role in cluster.roles))
    return "-".join(parts if cluster.uses_store else (*parts, "alone"))


def sketch_children(
    cluster: KVCacheCluster, layout: Layout, blocks: Mapping[BlockKey, PortBlock], optional_kinds: frozenset[str]
) -> Children:
    """A set or Deployment for each workload, a Service for each group, budgets, and the slots of engines."""
    del optional_kinds
    stages: dict[Stage, list[Manifest]] = {stage: [] for stage in Stage}
    for stage, intent in _children(cluster, layout, blocks):
        stages[stage].append(stamp(intent))
    return {stage: tuple(items) for stage, items in stages.items()}


def _children(
    cluster: KVCacheCluster, layout: Layout, blocks: Mapping[BlockKey, PortBlock]
) -> Iterator[tuple[Stage, Manifest]]:
    yield Stage.FOUNDATION, manifest(cluster, "ServiceAccount", cluster.name, {})
    image = {"image": cluster.images.mooncake or "v1"}
    if cluster.uses_store:
        if cluster.coordination.managed is not None:
            yield from _group(cluster, names.etcd_set(cluster.name), Component.ETCD, layout.etcd, {})
        yield from _group(cluster, names.master_set(cluster.name), Component.MASTER, layout.masters, image)
        for pool in cluster.pools:
            name, size = names.store_set(cluster.name, pool.name), layout.pools.get(pool.name, 0)
            yield from _group(cluster, name, Component.STORE, size, image, pool=pool.name)
    for role in cluster.roles:
        chosen = selector(cluster, Component.ENGINE, role=role.name)
        yield (
            Stage.FOUNDATION,
            manifest(cluster, "Service", names.engine_service(cluster.name, role.name), {}, own=chosen),
        )
    for one in layout.engines:
        name = names.engine_set(cluster.name, one.role, one.revision.name)
        chosen = selector(cluster, Component.ENGINE, role=one.role, revision=one.revision.name)
        own = chosen | {labels.LANE: one.revision.lane}
        slots = {
            f"slot-{key.slot}": str(block)
            for key, block in blocks.items()
            if (key.group, key.lane) == (one.role, one.revision.lane)
        }
        assert len(slots) >= one.replicas, f"{name} has {len(slots)} port blocks for {one.replicas} pods"
        yield Stage.FOUNDATION, manifest(cluster, "ConfigMap", name, {"data": slots}, own=own)
        yield Stage.ENGINES, manifest(cluster, "StatefulSet", name, _workload(one.replicas, own, {}), own=own)
    if cluster.router is not None:
        chosen = selector(cluster, Component.ROUTER)
        name = names.router_deployment(cluster.name)
        yield Stage.ENGINES, manifest(cluster, "Deployment", name, _workload(layout.router, chosen, {}), own=chosen)


def _group(
    cluster: KVCacheCluster,
    name: str,
    component: Component,
    replicas: int,
    content: Mapping[str, Any],
    *,
    pool: str = "",
) -> Iterator[tuple[Stage, Manifest]]:
    stages = {Component.ETCD: Stage.COORDINATION, Component.MASTER: Stage.MASTERS, Component.STORE: Stage.STORE}
    chosen = selector(cluster, component, pool=pool)
    yield Stage.FOUNDATION, manifest(cluster, "Service", name, {}, own=chosen)
    if replicas > 1:
        yield Stage.FOUNDATION, manifest(cluster, "PodDisruptionBudget", name, {}, own=chosen)
    yield stages[component], manifest(cluster, "StatefulSet", name, _workload(replicas, chosen, content), own=chosen)


def _workload(replicas: int, own: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, Any]:
    template = {"metadata": {"labels": dict(own)}, "spec": dict(content)}
    return {"spec": {"replicas": replicas, "template": template}}


def sketch_status(cluster: KVCacheCluster, observed: Observed, progress: Progress) -> Mapping[str, Any]:
    """No more than plans read back."""
    leader = leading_master(cluster, observed)
    truths = {
        "MasterLeaderElected": leader is not None,
        "RolloutHalted": bool(progress.rollout.halted),
        "DrainBlocked": bool(progress.blocked_drains),
        "PortsAllocated": not (progress.exhausted or progress.taken_ports),
    }
    before = {item["type"]: item for item in observed.status.get("conditions", ())}
    now = datetime.fromtimestamp(observed.now, UTC).isoformat()
    conditions = []
    for name, truth in truths.items():
        text, former = str(truth), before.get(name, {})
        since = former["lastTransitionTime"] if former.get("status") == text else now
        generation = cluster.metadata.generation
        conditions.append({"type": name, "status": text, "observedGeneration": generation, "lastTransitionTime": since})
    conditions.append({"type": "Progressing", "reason": "RollingOut" if progress.rollout.running else "Settled"})
    return {
        "conditions": conditions,
        "leader": {"pod": leader.name} if leader is not None else {},
        "revisions": {"current": progress.rollout.current},
    }


SKETCH = Builders(sketch_revision, sketch_children, sketch_status)
"""For simulations."""
