"""When to look at a cluster again without any event. Pure; called by `plan`.

Pods and objects announce their changes. Only what answers when asked has to be asked: masters, drains, clocks.
"""

from __future__ import annotations

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component, Observed
from kvtier_operator.planning.ledger import QUARANTINE_S, Ledger
from kvtier_operator.planning.masters import leading_master
from kvtier_operator.planning.pods import LONG_WAIT_S
from kvtier_operator.planning.progress import Progress
from kvtier_operator.planning.wants import owner_of

ELECTION_POLL_S = 1.0
DRAIN_POLL_S = 2.0
WAIT_POLL_S = 5.0
LONG_WAIT_POLL_S = 60.0
"""Nothing new is expected: a pod that has waited for a minute will be announced when it moves."""


def next_look_s(cluster: KVCacheCluster, observed: Observed, progress: Progress, ledger: Ledger) -> float:
    """Seconds until the next pass; 0 = an event is enough."""
    delays = []
    if _electing(cluster, observed) and not progress.deleting:
        delays.append(ELECTION_POLL_S)
    if progress.draining:
        delays.append(LONG_WAIT_POLL_S if progress.blocked_drains else DRAIN_POLL_S)
    if _waits(progress):
        young = [pod for pod in observed.pods if not pod.ready and pod.waiting_s < LONG_WAIT_S]
        unready = [pod for pod in observed.pods if not pod.ready]
        delays.append(WAIT_POLL_S if young or not unready else LONG_WAIT_POLL_S)
    if progress.exhausted or progress.taken_ports or progress.conflicts:
        delays.append(LONG_WAIT_POLL_S)
    delays += _quarantines(cluster, ledger, observed.now)
    return min(delays, default=0.0)


def _electing(cluster: KVCacheCluster, observed: Observed) -> bool:
    """True while a master that could answer has not, or none of them leads."""
    ready = [pod for pod in observed.pods_of(Component.MASTER) if pod.ready]
    if not ready or not cluster.coordination.uses_etcd or not cluster.uses_store:
        return False
    return leading_master(cluster, observed) is None or any(pod.name not in observed.masters for pod in ready)


def _waits(progress: Progress) -> bool:
    """True while something goes on that ends by itself."""
    rollout = progress.rollout
    if rollout.halted or rollout.approval_wanted:
        return progress.stage is not None
    return bool(progress.waiting_for or progress.deleting)


def _quarantines(cluster: KVCacheCluster, ledger: Ledger, now: float) -> list[float]:
    """Seconds until ports of ours are free again."""
    owner = owner_of(cluster)
    released = [entry.released_at for key, entry in ledger.entries.items() if key.cluster == owner]
    released += [one.released_at for one in ledger.retired if one.key.cluster == owner]
    return [max(1.0, since + QUARANTINE_S - now) for since in released if since is not None]
