"""Counts the pods of each component against what is wanted, and says what keeps the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Observed, ObservedPod
from kvtier_operator.planning.masters import leading_master
from kvtier_operator.planning.pods import LONG_WAIT_S, blocker
from kvtier_operator.status.conditions import listing, sentences


@dataclass(frozen=True, slots=True)
class Tally:
    """Pods of one group.

    Attributes:
        name: of the group, for messages: ``pool dram``.
        desired: pods wanted.
        ready: pods that serve.
        unready: pods that exist and do not serve; those that are leaving do not count.
        unmounted: pods that are ready although the leading master does not list their memory.
    """

    name: str
    desired: int
    ready: int
    unready: tuple[ObservedPod, ...] = ()
    unmounted: tuple[ObservedPod, ...] = ()

    @property
    def complete(self) -> bool:
        """True when as many serve as are wanted."""
        return self.ready >= self.desired

    @property
    def troubled(self) -> tuple[ObservedPod, ...]:
        """Pods that time alone does not seem to mend: failed, or waiting for a minute."""
        return tuple(pod for pod in self.unready if pod.failure or pod.waiting_s >= LONG_WAIT_S)

    @property
    def words(self) -> str:
        """How many serve, and why the others do not."""
        starting = [pod.name for pod in self.unready if pod not in self.troubled]
        absent = self.desired - self.ready - len(self.unready) - len(self.unmounted)
        return sentences(
            [
                f"{self.ready} of {self.desired} of {self.name} serve",
                listing([blocker(pod) for pod in self.troubled]),
                f"{listing(starting)} not ready yet" if starting else "",
                f"{listing([pod.name for pod in self.unmounted])} not known to the leading master"
                if self.unmounted
                else "",
                f"{absent} not made yet; if it stays so, describe the set" if absent > 0 else "",
            ]
        )


def etcd_tally(cluster: KVCacheCluster, observed: Observed) -> Tally:
    """Members of a managed etcd."""
    return _tally("etcd", cluster.etcd_replicas, observed.pods_of(Component.ETCD))


def masters_tally(cluster: KVCacheCluster, observed: Observed) -> Tally:
    """Masters that answer."""
    return _tally("masters", cluster.master_replicas, observed.pods_of(Component.MASTER))


def store_tallies(cluster: KVCacheCluster, observed: Observed) -> Iterator[Tally]:
    """Storage nodes by pool; one serves when the leading master, as soon as it was asked, lists its memory."""
    leader = leading_master(cluster, observed) if cluster.uses_store else None
    asked = leader is not None and leader.name in observed.masters
    for pool in cluster.pools if cluster.uses_store else ():
        pods = observed.pods_of(Component.STORE, pool.name)
        lost = tuple(pod for pod in pods if pod.ready and asked and pod.name not in observed.segments)
        yield _tally(f"pool {pool.name}", pool.replicas, pods, lost)


def role_tallies(cluster: KVCacheCluster, observed: Observed) -> Iterator[Tally]:
    """Engines by role, of any revision."""
    for role in cluster.roles:
        yield _tally(f"role {role.name}", role.replicas, observed.pods_of(Component.ENGINE, role.name))


def router_tally(cluster: KVCacheCluster, observed: Observed) -> Tally:
    """Routers."""
    return _tally("routers", cluster.router_replicas, observed.pods_of(Component.ROUTER))


def shares(tallies: Iterable[Tally]) -> str:
    """Serving of wanted, as in ``3/4``."""
    counted = list(tallies)
    return f"{sum(one.ready for one in counted)}/{sum(one.desired for one in counted)}"


def _tally(name: str, desired: int, pods: Sequence[ObservedPod], unmounted: tuple[ObservedPod, ...] = ()) -> Tally:
    unready = tuple(pod for pod in pods if not pod.ready and not pod.deleting)
    ready = sum(pod.ready and pod not in unmounted for pod in pods)
    return Tally(name, desired, ready, unready, unmounted)
