"""Makes the observation of one cluster from what the index and the masters' answers hold. Pure.

Every pass starts here; nothing is remembered from the pass before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier_operator.api import KIND, KVCacheCluster
from kvtier_operator.controller.index import ClusterKey, Index, Record
from kvtier_operator.controller.masters import AdminAddress, DrainProgress, MastersView, Targets
from kvtier_operator.controller.neighbours import blocks_of_all, gone_owners
from kvtier_operator.errors import LedgerError
from kvtier_operator.labels import PORT_BLOCK
from kvtier_operator.names import HOST_LEDGER, ledger_config, master_set
from kvtier_operator.observed import (
    Component,
    DrainPhase,
    DrainState,
    Manifest,
    ObjectRef,
    Observed,
    ObservedObject,
    ObservedPod,
    observed_object,
)
from kvtier_operator.planning.ledger import Ledger
from kvtier_operator.planning.ledger_data import read_ledger, read_slots
from kvtier_operator.planning.ports import MasterPort

NO_DRAIN_JOBS = "unsupported"
"""Value of the annotation ``kvtier.dev/drain-job`` where the running master has no drain jobs."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known beside the index.

    Attributes:
        view: the masters' newest answers.
        foreign: objects of others that have names of ours.
        optional_kinds: that the API server has.
        now: seconds since the epoch.
    """

    view: MastersView = field(default_factory=MastersView)
    foreign: tuple[ObservedObject, ...] = ()
    optional_kinds: frozenset[str] = frozenset()
    now: float = 0.0


def ledger_place(cluster: KVCacheCluster, operator_namespace: str) -> tuple[str, str]:
    """Namespace and name of the ConfigMap with the cluster's port blocks."""
    if cluster.transport.host_network:
        return operator_namespace, HOST_LEDGER
    return cluster.metadata.namespace, ledger_config(cluster.name)


def observe(cluster: KVCacheCluster, index: Index, operator_namespace: str, around: Surroundings) -> Observed:
    """Everything known of one cluster.

    Raises:
        LedgerError: the ledger's ConfigMap cannot be read, and the cluster needs ports.
    """
    key = ClusterKey(cluster.metadata.namespace, cluster.name)
    own_ledger = ObjectRef("ConfigMap", ledger_config(cluster.name))
    records = [record for record in index.of(key) if record.ref.kind != KIND and record.ref != own_ledger]
    children = [observed_object(record.ref, record.live()) for record in records if record.ref.kind != "Pod"]
    objects = {found.ref: found for found in (*around.foreign, *children)}
    newest = {record.ref.name: record.newest for record in records if record.newest}
    unsettled = any(not record.settled for record in records)
    pods = tuple(_pods(records, newest, around.now, router_settled=not unsettled))
    live = index.cluster(key)
    ledger = _ledger(index, *ledger_place(cluster, operator_namespace), needed=not cluster.metadata.deleting)
    shared = cluster.transport.host_network
    return Observed(
        objects=objects,
        pods=pods,
        masters=around.view.masters,
        segments=frozenset(around.view.segments),
        drains={drain.pod: drain for drain in _drains(records, around)},
        ledger=ledger,
        stated=blocks_of_all(index) if shared and not ledger.resource_version else {},
        gone=gone_owners(index, ledger) if shared else frozenset(),
        optional_kinds=around.optional_kinds,
        status={} if live is None else live.live().get("status") or {},
        now=around.now,
    )


def poll_targets(cluster: KVCacheCluster, index: Index) -> Targets:
    """What to ask the masters of a cluster."""
    key = ClusterKey(cluster.metadata.namespace, cluster.name)
    workload = index.find(key.namespace, ObjectRef("StatefulSet", master_set(cluster.name)))
    port = None if workload is None else _admin_port(workload.live())
    if port is None:
        return Targets()
    masters: dict[str, AdminAddress] = {}
    stores: dict[str, str] = {}
    jobs: set[str] = set()
    for record in index.of(key):
        pod = record.pod
        if pod is None or not pod.ip:
            continue
        if pod.component is Component.MASTER:
            masters[record.ref.name] = AdminAddress(pod.ip, port)
        elif pod.component is Component.STORE:
            stores |= {record.ref.name: record.ref.name, pod.ip: record.ref.name}
            if pod.drain_job not in {"", NO_DRAIN_JOBS}:
                jobs.add(pod.drain_job)
    return Targets(masters, stores, frozenset(jobs))


def _admin_port(workload: Manifest) -> int | None:
    text = (workload["metadata"].get("annotations") or {}).get(PORT_BLOCK, "")
    block = next(iter(read_slots(text).values()), None)
    return None if block is None else block.port(MasterPort.ADMIN)


def _pods(
    records: Iterable[Record], newest: Mapping[str, str], now: float, *, router_settled: bool
) -> Iterable[ObservedPod]:
    for record in records:
        if record.pod is None:
            continue
        template = newest.get(record.pod.owner)
        if record.pod.component is Component.ROUTER and not router_settled:
            # Which ReplicaSet is the newest is not known; the Deployment only says that it is not done.
            template = "unsettled"
        yield record.pod.observed(record.ref.name, record.uid, template, now)


def _drains(records: Iterable[Record], around: Surroundings) -> Iterable[DrainState]:
    for record in records:
        pod = record.pod
        if pod is None or not pod.drain_job:
            continue
        if pod.drain_job == NO_DRAIN_JOBS:
            progress = DrainProgress(
                DrainPhase.UNSUPPORTED, "the running master has no drain jobs, or does not know the segment"
            )
        else:
            progress = around.view.drains.get(pod.drain_job, DrainProgress(DrainPhase.RUNNING, "not asked yet"))
        since = pod.drain_since or around.now
        running_s = max(0.0, around.now - since)
        yield DrainState(record.ref.name, progress.phase, running_s, pod.drain_job, progress.detail)


def _ledger(index: Index, namespace: str, name: str, *, needed: bool) -> Ledger:
    record = index.find(namespace, ObjectRef("ConfigMap", name))
    if record is None:
        return Ledger()
    try:
        return read_ledger(record.live().get("data") or {}, str(record.version))
    except LedgerError:
        if needed:
            raise
        return Ledger()  # who leaves gets no ports any more
