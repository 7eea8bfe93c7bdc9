"""Which blocks of ports pods use, or may use any moment, told from workloads and pods alone. Pure.

A set says in its annotation ``kvtier.dev/port-block`` which block each slot has, so that a lost ledger can be made
again from what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from kvtier_operator import labels
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import WORKLOAD_KINDS, Component, Observed, ObservedObject, ObservedPod
from kvtier_operator.planning.layout import Layout
from kvtier_operator.planning.ledger import BlockKey
from kvtier_operator.planning.ledger_data import read_slots, slots_text
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.wants import ALL_PODS, LANES, api_key, block_key, owner_of
from kvtier_operator.planning.workloads import group_of, is_ours


def annotation_of(
    cluster: KVCacheCluster, component: Component, group: str, lane: str, blocks: Mapping[BlockKey, PortBlock]
) -> str:
    """Value of ``kvtier.dev/port-block`` on one workload: its blocks by slot.

    Slot -1 is the block of all pods; in a set of engines, whose pods have a block each, their common HTTP port.

    Args:
        cluster: whose workload.
        component: what its pods are for.
        group: pool or role; empty for others.
        lane: of a set of engines.
        blocks: all blocks of the cluster.
    """
    name = owner_of(cluster)
    group_of_blocks = block_key(name, component, group).group
    mine = {key.slot: block for key, block in blocks.items() if (key.group, key.lane) == (group_of_blocks, lane)}
    api = blocks.get(api_key(name, group)) if component is Component.ENGINE else None
    if api is not None:
        mine[ALL_PODS] = api
    return slots_text(mine)


def live_keys(cluster: KVCacheCluster, layout: Layout, observed: Observed) -> frozenset[BlockKey]:
    """Owners whose block may be in use: of pods that exist, and of pods that an existing workload may make again.

    The HTTP port of a role counts as in use only by engines that are not wanted any more: a wanted one is kept anyway,
    and a former one must go some day.
    """
    name, own = owner_of(cluster), _own(cluster, observed)
    return _keys(name, own, observed.pods) | {api_key(name, group) for group in _leaving(layout, own, observed.pods)}


def _leaving(layout: Layout, workloads: Iterable[ObservedObject], pods: Iterable[ObservedPod]) -> Iterator[str]:
    """Roles of which pods exist or may be made that the layout does not have."""
    wanted = {(engines.role, engines.revision.name) for engines in layout.engines if engines.replicas}
    for workload in workloads:
        role, revision = workload.labels.get(labels.ROLE, ""), workload.labels.get(labels.REVISION, "")
        if role and workload.replicas and (role, revision) not in wanted:
            yield role
    for pod in pods:
        if pod.component is Component.ENGINE and (pod.group, pod.revision) not in wanted:
            yield pod.group


def stated_blocks(
    cluster: str, workloads: Iterable[ObservedObject], pods: Iterable[ObservedPod]
) -> Mapping[BlockKey, PortBlock]:
    """Blocks in use, as the annotations of one cluster's workloads state them; for `adopt` when the ledger is lost.

    A shared ledger is complete only with those of every cluster: before that, nobody may allocate from it.

    Args:
        cluster: as `owner_of` spells it.
        workloads: objects that the cluster owns.
        pods: of the cluster.
    """
    existing = list(pods)
    found: dict[BlockKey, PortBlock] = {}
    for workload in workloads:
        if workload.ref.kind not in WORKLOAD_KINDS:
            continue
        component, group, lane = _place_of(workload)
        slots = _slots(workload, existing)
        for slot, block in read_slots(_annotation(workload)).items():
            if slots and component is Component.ENGINE and slot == ALL_PODS:
                found[api_key(cluster, group)] = block
            elif slot in slots or (slots and slot == ALL_PODS):
                found[block_key(cluster, component, group, lane, slot)] = block
    return found


def _slots(workload: ObservedObject, pods: Iterable[ObservedPod]) -> frozenset[int]:
    """Slots of which a pod exists, or may be made again."""
    component, group, _ = _place_of(workload)
    revision = workload.labels.get(labels.REVISION)
    existing = (
        pod.slot
        for pod in pods
        if (pod.component, pod.group) == (component, group) and revision in (None, pod.revision)
    )
    return frozenset(chain(range(workload.replicas), existing))


def _own(cluster: KVCacheCluster, observed: Observed) -> list[ObservedObject]:
    return [
        found for found in observed.objects.values() if found.ref.kind in WORKLOAD_KINDS and is_ours(cluster, found)
    ]


def _keys(cluster: str, workloads: Iterable[ObservedObject], pods: Iterable[ObservedPod]) -> frozenset[BlockKey]:
    workloads = list(workloads)
    lanes = {
        found.labels[labels.REVISION]: found.labels[labels.LANE]
        for found in workloads
        if labels.REVISION in found.labels and labels.LANE in found.labels
    }
    made_again = (_keys_of_workload(cluster, workload) for workload in workloads)
    existing = (_keys_of_pod(cluster, pod, lanes) for pod in pods)
    return frozenset(chain(chain.from_iterable(made_again), chain.from_iterable(existing)))


def _place_of(workload: ObservedObject) -> tuple[Component, str, str]:
    """Component, group and lane of a workload of ours."""
    return Component(workload.labels[labels.COMPONENT]), group_of(workload), workload.labels.get(labels.LANE, "")


def _annotation(workload: ObservedObject) -> str:
    annotations = (workload.live.get("metadata") or {}).get("annotations") or {}
    return str(annotations.get(labels.PORT_BLOCK, ""))


def _keys_of_workload(cluster: str, workload: ObservedObject) -> Iterator[BlockKey]:
    component, group, lane = _place_of(workload)
    return (block_key(cluster, component, group, lane, slot) for slot in range(workload.replicas))


def _keys_of_pod(cluster: str, pod: ObservedPod, lanes: Mapping[str, str]) -> Iterator[BlockKey]:
    """One; of an engine whose set is gone, in each lane, because either may be its."""
    unknown = LANES if pod.component is Component.ENGINE else ("",)
    for lane in (lanes[pod.revision],) if pod.revision in lanes else unknown:
        yield block_key(cluster, pod.component, pod.group, lane, pod.slot)
