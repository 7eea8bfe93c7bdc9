"""Everything that conditions are judged by, gathered once a pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_operator.api import KVCacheCluster, RoleType
from kvtier_operator.observed import Component, ObjectRef, Observed, ObservedPod
from kvtier_operator.planning.masters import leading_master
from kvtier_operator.planning.progress import Progress
from kvtier_operator.planning.remembered import last_revision
from kvtier_operator.planning.stages import missing_quorum
from kvtier_operator.status.tally import (
    Tally,
    etcd_tally,
    masters_tally,
    role_tallies,
    router_tally,
    store_tallies,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """One cluster at one moment.

    Attributes:
        established: some engine has served before, so that what is missing now was lost.
    """

    cluster: KVCacheCluster
    observed: Observed
    progress: Progress
    leader: ObservedPod | None
    etcd: Tally
    masters: Tally
    pools: tuple[Tally, ...]
    roles: tuple[Tally, ...]
    router: Tally
    established: bool

    @property
    def idle(self) -> bool:
        """True when no engine is wanted."""
        return not any(role.desired for role in self.roles)

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """Of all components, in start order."""
        return (self.etcd, self.masters, *self.pools, *self.roles, self.router)

    @property
    def quorum(self) -> bool:
        """True when the managed etcd can decide, or there is none."""
        return not missing_quorum(self.cluster, self.observed)

    @property
    def rolling(self) -> bool:
        """True while engines of one revision replace those of another; the first creation is no rollout."""
        return bool(self.progress.rollout.current) and self.progress.rollout.running

    @property
    def changing(self) -> list[ObjectRef]:
        """Workloads of which nobody can tell yet what pods are of the newest form."""
        unseen = (found.ref for found in self.observed.objects.values() if found.unseen)
        return sorted({*self.progress.changes, *unseen})

    @property
    def served_by(self) -> str:
        """Revision whose ready engines are enough for requests; the one that leads the rollout first; empty = none."""
        rollout = self.progress.rollout
        ready = [pod for pod in self.observed.pods_of(Component.ENGINE) if pod.ready]
        candidates = dict.fromkeys((rollout.current, rollout.target, *sorted(pod.revision for pod in ready)))
        return next((name for name in candidates if name and self._can_serve(name, ready)), "")

    def _can_serve(self, revision: str, ready: list[ObservedPod]) -> bool:
        present = {pod.group for pod in ready if pod.revision == revision}
        kinds = {role.type for role in self.cluster.roles if role.name in present}
        return RoleType.FUSED in kinds or {RoleType.PREFILL, RoleType.DECODE} <= kinds


def gather(cluster: KVCacheCluster, observed: Observed, progress: Progress) -> Facts:
    """The facts of a pass."""
    return Facts(
        cluster,
        observed,
        progress,
        leading_master(cluster, observed) if cluster.uses_store else None,
        etcd_tally(cluster, observed),
        masters_tally(cluster, observed),
        tuple(store_tallies(cluster, observed)),
        tuple(role_tallies(cluster, observed)),
        router_tally(cluster, observed),
        established=bool(last_revision(observed)),
    )
