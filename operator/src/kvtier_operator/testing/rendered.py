"""The objects of a cluster by kind and name, and what tests ask of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.controller.dry_run import settled_layout
from kvtier_operator.kinds import OPTIONAL_KINDS
from kvtier_operator.observed import WORKLOAD_KINDS, Manifest
from kvtier_operator.planning.layout import Layout, Stage
from kvtier_operator.planning.ledger import BlockKey, Ledger
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.wants import allocate_blocks
from kvtier_operator.resources.objects.children import children

MONITORING_KINDS = frozenset(kind.name for kind in OPTIONAL_KINDS)
Objects = Mapping[tuple[str, str], Manifest]


def blocks_of(cluster: KVCacheCluster) -> Mapping[BlockKey, PortBlock]:
    """Ports of a cluster that nobody had any before."""
    return allocate_blocks(cluster, settled_layout(cluster), Ledger(), frozenset(), now=0.0).blocks


def staged(
    cluster: KVCacheCluster, layout: Layout | None = None, kinds: frozenset[str] = MONITORING_KINDS
) -> Mapping[Stage, tuple[Manifest, ...]]:
    """Children by stage.

    Args:
        cluster: any.
        layout: None = as the manifest wants it; never more pods than that.
        kinds: optional ones that exist.
    """
    return children(cluster, layout or settled_layout(cluster), blocks_of(cluster), kinds)


def built(cluster: KVCacheCluster, layout: Layout | None = None, kinds: frozenset[str] = MONITORING_KINDS) -> Objects:
    """Children by kind and name, in the order in which they are made; arguments as in `staged`."""
    made = staged(cluster, layout, kinds)
    return {(item["kind"], item["metadata"]["name"]): item for stage in Stage for item in made[stage]}


def workloads(objects: Objects) -> Iterator[Manifest]:
    """StatefulSets and Deployments."""
    return (item for (kind, _), item in objects.items() if kind in WORKLOAD_KINDS)


def pod(workload: Manifest) -> dict[str, Any]:
    """Spec of its pods."""
    return dict(workload["spec"]["template"]["spec"])


def container(workload: Manifest) -> dict[str, Any]:
    """The only container of its pods."""
    (only,) = pod(workload)["containers"]
    return dict(only)


def environment(workload: Manifest) -> dict[str, str]:
    """Variables of its container; those that come from elsewhere are empty."""
    return {item["name"]: item.get("value", "") for item in container(workload)["env"]}


def flags(texts: Iterable[str]) -> dict[str, str]:
    """Flags with a value, by name."""
    return dict(text.removeprefix("--").split("=", 1) for text in texts if "=" in text)


def slot_lines(objects: Objects, config: str, file: str) -> list[str]:
    """Lines of one file of a set's slots."""
    return str(objects["ConfigMap", config]["data"][file]).splitlines()
