"""The operator killed after every action of every plan of a cluster's life: it always arrives where it would have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from kvtier_operator import labels
from kvtier_operator.api import DeletionPolicy, Images, KVCacheCluster, Rollout
from kvtier_operator.testing.completeness import unfinished
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.sample_clusters import changed, sample_cluster, sample_pool, split_roles
from kvtier_operator.testing.sketch import SKETCH
from kvtier_operator.testing.world import World
from kvtier_operator.testing.world_records import template_of

FIRST = sample_cluster(
    roles=split_roles(2, 4),
    pools=[sample_pool("dram", 2), sample_pool("spare", 1)],
    deletion=DeletionPolicy.DRAIN,
)

CHANGES: dict[str, Callable[[KVCacheCluster], KVCacheCluster]] = {
    "create": lambda cluster: cluster,
    "roll masters and storage nodes": lambda cluster: changed(cluster, images=Images(mooncake="v2")),
    "roll engines in place": lambda cluster: changed(cluster, images=Images(mooncake="v2", engine="v2")),
    "scale": lambda cluster: changed(
        cluster, roles=split_roles(1, 3), pools=(sample_pool("dram", 1), sample_pool("spare", 2))
    ),
    "drop a pool": lambda cluster: changed(cluster, pools=(sample_pool("spare", 2),)),
    "fewer masters": lambda cluster: changed(cluster, master=replace(cluster.master, replicas=1)),
    "roll back with surge": lambda cluster: changed(
        cluster, images=Images(mooncake="v2", engine="v1"), rollout=Rollout(max_surge=1)
    ),
    "a third revision": lambda cluster: changed(cluster, images=Images(mooncake="v2", engine="v3")),
    "delete": lambda cluster: replace(cluster, metadata=replace(cluster.metadata, deleting=True)),
}


def end_of(world: World) -> dict[str, object]:
    """What must not depend on where the operator was killed; who leads and which ports are free again may."""
    objects = {
        str(ref): item.live["metadata"]["annotations"][labels.APPLIED_HASH] for ref, item in world.objects.items()
    }
    sets = [item.live for ref, item in world.objects.items() if ref.kind in ("StatefulSet", "Deployment")]
    templates = {live["metadata"]["name"]: (live["spec"]["replicas"], template_of(live)) for live in sets}
    pods = {name: (pod.template, pod.ready) for name, pod in world.pods.items()}
    return {
        "objects": objects,
        "workloads": templates,
        "pods": pods,
        "drains": dict(world.drains),
        "finalizers": world.cluster.metadata.finalizers,
        "gone": world.gone,
    }


def settled(world: World) -> World:
    Fold(world, SKETCH).settle()
    return world


@cache
def worlds() -> dict[str, World]:
    """The world right before each change is seen, everything before it settled."""
    names = list(CHANGES)
    first = World(FIRST, seed=7)

    def then(world: World, name: str) -> World:
        after = settled(copy.deepcopy(world))
        after.cluster = CHANGES[name](after.cluster)
        return after

    return dict(zip(names, accumulate(names[1:], then, initial=first), strict=True))


@pytest.mark.parametrize("change", CHANGES)
def test_killed_after_any_action_it_arrives_at_the_same_end(change: str) -> None:
    reference = settled(copy.deepcopy(worlds()[change]))
    expected = end_of(reference)
    assert reference.gone or unfinished(reference, SKETCH.revision(reference.cluster)) == []
    world, cuts = copy.deepcopy(worlds()[change]), 0
    while True:
        fold = Fold(copy.deepcopy(world), SKETCH)
        actions = () if world.gone else fold.look().actions
        for cut in range(1, len(actions) + 1):
            fold = Fold(copy.deepcopy(world), SKETCH)
            fold.step(cut)
            fold.settle(quiet=4)
            assert end_of(fold.world) == expected, f"killed after action {cut} of {actions}\n" + "\n".join(fold.trace)
            cuts += 1
        if world.gone or (not actions and not world.moving and end_of(world) == expected):
            break
        Fold(world, SKETCH).step()
    assert cuts > 0
