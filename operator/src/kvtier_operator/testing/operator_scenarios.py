"""Random lives of a cluster, from a seed: what the user wants, what goes wrong, when. Pure; used by simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from kvtier_operator import labels
from kvtier_operator.api import (
    Drain,
    DrainMode,
    DrainTimeout,
    KVCacheCluster,
    Role,
    Rollout,
    RolloutPolicy,
    StorePool,
)
from kvtier_operator.observed import ObjectRef
from kvtier_operator.testing.completeness import unfinished
from kvtier_operator.testing.folding import Fold
from kvtier_operator.testing.sample_clusters import (
    approved,
    changed,
    sample_cluster,
    sample_pool,
    sample_role,
    split_roles,
)
from kvtier_operator.testing.sketch import SKETCH
from kvtier_operator.testing.world import World
from kvtier_operator.testing.world_records import Faults

_IMAGES = ("v1", "v2", "v3")
_STRANGER = ObjectRef("Service", "kv-engine")
"""Somebody else's, with a name that a cluster with a role ``engine`` wants."""
_ENDURANCE = 8
"""Touches of the spec until a halted rollout is through: each pod that had failed by chance halts it again."""


@dataclass(slots=True)
class Life:
    """One cluster from its creation to rest.

    Attributes:
        seed: of everything.
        faulty: pods die, leaders step down, people edit, writes conflict, the operator is killed.
    """

    seed: int
    faulty: bool = True
    fold: Fold = field(init=False)
    _chance: Random = field(init=False)
    _split: bool = field(init=False)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)  # noqa: S311 - a seed repeats a run
        self._split = self._perhaps(0.4)
        faults = Faults(0.02, 0.1, 0.03, 0.05, 0.1, 0.1, 0.6, 0.3, 0.5) if self.faulty else Faults()
        world = World(self._first(), self.seed, faults, drains_supported=self._perhaps(0.5))
        if self.faulty and self._perhaps(0.7):
            bad = self._chance.choice(_IMAGES[1:])
            world.bad_revisions = {f"{bad}-e", f"{bad}-e-o", f"{bad}-p-d"}
        self.fold = Fold(world, SKETCH)

    def run(self) -> Fold:
        """Create, change, and let rest.

        Raises:
            AssertionError: with the seed; a promise was broken, or it does not come to rest, or not to what was wanted.
        """
        world = self.fold.world
        if self.faulty and self._perhaps(0.2):
            world.add({"kind": _STRANGER.kind, "metadata": {"name": _STRANGER.name, "labels": {}}})
        self.fold.run(self._chance.randrange(1, 30))
        for _ in range(self._chance.randrange(2, 8)):
            world.cluster = self._chance.choice(self._changes())(world.cluster)
            self.fold.run(self._chance.randrange(1, self._chance.choice((6, 25))))
        world.bad_revisions = set()
        if _STRANGER in world.objects and "ownerReferences" not in world.objects[_STRANGER].live["metadata"]:
            world.remove(_STRANGER)
        for _ in range(_ENDURANCE):
            self.fold.settle(300)
            if not self._stands_still():
                break
            world.cluster = changed(approved(world.cluster, SKETCH.revision(world.cluster)))
        left = unfinished(world, SKETCH.revision(world.cluster))
        assert not left, "\n".join((f"seed {self.seed}", *self.fold.trace[-25:], *left))
        return self.fold

    def _stands_still(self) -> bool:
        """A rollout waits for the user."""
        cluster = self.fold.world.cluster
        halted = any(
            item["type"] == "RolloutHalted" and item["status"] == "True"
            for item in self.fold.world.status["conditions"]
            if "status" in item
        )
        supervised = cluster.rollout.policy is RolloutPolicy.SUPERVISED
        approval = cluster.metadata.annotations.get(labels.APPROVE)
        return halted or (supervised and approval != SKETCH.revision(cluster))

    def _perhaps(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _first(self) -> KVCacheCluster:
        etcd = self._chance.choice((0, 1, 3))
        return sample_cluster(
            roles=self._roles(),
            pools=self._pools(),
            masters=self._chance.choice((1, 3, 5)) if etcd else 1,
            etcd=etcd,
            rollout=self._rollout(),
        )

    def _roles(self) -> tuple[Role, ...]:
        if self._split:
            return split_roles(self._chance.choice((0, 1, 2, 3, 4)), self._chance.choice((0, 2, 4, 5, 6)))
        names = ("engine", "other")[: self._chance.randrange(1, 3)]
        return tuple(sample_role(name, self._chance.choice((0, 1, 2, 3, 4, 4))) for name in names)

    def _pools(self) -> tuple[StorePool, ...]:
        names = ("dram", "spare")[: self._chance.randrange(1, 3)]
        return tuple(sample_pool(name, self._chance.choice((0, 1, 2, 3, 3)), self._drain()) for name in names)

    def _drain(self) -> Drain:
        mode = self._chance.choice((DrainMode.MIGRATE, DrainMode.MIGRATE, DrainMode.DISCARD))
        return Drain(mode, self._chance.choice((10_000, 600_000)), self._chance.choice(tuple(DrainTimeout)))

    def _rollout(self) -> Rollout:
        policy = RolloutPolicy.SUPERVISED if self._perhaps(0.2) else RolloutPolicy.AUTOMATIC
        return Rollout(policy, self._chance.randrange(3))

    def _changes(self) -> tuple[Callable[[KVCacheCluster], KVCacheCluster], ...]:
        """What a user may do."""
        image = self._chance.choice(_IMAGES)
        masters = self._chance.choice((1, 3, 5))
        return (
            lambda cluster: changed(cluster, images=replace(cluster.images, engine=image)),
            lambda cluster: changed(cluster, images=replace(cluster.images, engine=image)),
            lambda cluster: changed(cluster, images=replace(cluster.images, mooncake=image)),
            lambda cluster: changed(cluster, roles=self._roles(), pools=cluster.pools or self._pools()),
            lambda cluster: cluster if self._split else _without_store(cluster),
            lambda cluster: changed(cluster, pools=self._pools()),
            lambda cluster: changed(cluster, pools=self._pools()),
            lambda cluster: changed(cluster, rollout=self._rollout()),
            lambda cluster: approved(cluster, SKETCH.revision(cluster)),
            lambda cluster: (
                changed(cluster, master=replace(cluster.master, replicas=masters))
                if cluster.coordination.uses_etcd
                else cluster
            ),
        )


def _without_store(cluster: KVCacheCluster) -> KVCacheCluster:
    roles = tuple(replace(role, tiers=replace(role.tiers, store_enabled=False)) for role in cluster.roles)
    return changed(cluster, roles=roles, pools=())
