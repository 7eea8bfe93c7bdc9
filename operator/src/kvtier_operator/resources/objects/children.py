"""Every object that a cluster should have, by the stage that makes it first. Pure; called by `reconcile`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Manifest
from kvtier_operator.planning.layout import Layout, Stage
from kvtier_operator.planning.ledger import BlockKey
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.resources.objects.access import access_objects
from kvtier_operator.resources.objects.coordination import etcd_objects
from kvtier_operator.resources.objects.engines import engine_objects
from kvtier_operator.resources.objects.manifests import stamp
from kvtier_operator.resources.objects.masters import master_objects
from kvtier_operator.resources.objects.monitoring import monitoring_objects
from kvtier_operator.resources.objects.places import Places
from kvtier_operator.resources.objects.routing import router_objects
from kvtier_operator.resources.objects.stores import store_objects


def children(
    cluster: KVCacheCluster,
    layout: Layout,
    blocks: Mapping[BlockKey, PortBlock],
    optional_kinds: frozenset[str],
) -> Mapping[Stage, tuple[Manifest, ...]]:
    """All children but engine sets of older revisions, which are never rendered again.

    Args:
        cluster: a parsed manifest.
        layout: pods by workload.
        blocks: ports of every pod of the layout.
        optional_kinds: kinds that exist here though not everywhere, as ``ServiceMonitor``.
    """
    places = Places(cluster, blocks)
    made = chain(
        access_objects(cluster),
        etcd_objects(places, layout.etcd),
        master_objects(places, layout.masters),
        store_objects(places, layout.pools),
        engine_objects(places, layout.engines),
        router_objects(places, layout.router),
        monitoring_objects(cluster, optional_kinds),
    )
    stages: dict[Stage, list[Manifest]] = {stage: [] for stage in Stage}
    for stage, intent in made:
        stages[stage].append(stamp(intent))
    return {stage: tuple(manifests) for stage, manifests in stages.items()}
