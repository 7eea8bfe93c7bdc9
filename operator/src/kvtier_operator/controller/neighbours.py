"""The other clusters of the host network's ledger: what they use when it is lost, and which of them are gone. Pure.

A cluster on the pod network has a ledger to itself, which its own pass makes again and the garbage collector takes
away.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_operator.controller.index import ClusterKey, Index, Record
from kvtier_operator.observed import WORKLOAD_KINDS, observed_object
from kvtier_operator.planning.in_use import stated_blocks
from kvtier_operator.planning.ledger import BlockKey, Ledger, owner
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.spec_rules import on_host_network


def blocks_of_all(index: Index) -> Mapping[BlockKey, PortBlock]:
    """Blocks in use on the host network, as workloads of every cluster there state them."""
    found: dict[BlockKey, PortBlock] = {}
    for key in index.clusters():
        record = index.cluster(key)
        if record is not None and on_host_network(record.live()):
            own = [observed_object(one.ref, one.live()) for one in _workloads(index, key)]
            own = [one for one in own if one.owner_uid == record.uid]
            pods = [one.pod.observed(one.ref.name, one.uid, None, 0.0) for one in index.of(key) if one.pod is not None]
            found |= stated_blocks(owner(*key, record.uid), own, pods)
    return found


def gone_owners(index: Index, ledger: Ledger) -> frozenset[str]:
    """Owners in the ledger of whom nothing is left: neither the cluster, nor a workload, nor a pod."""
    return frozenset(name for name in ledger.clusters if not _is_there(index, name))


def _is_there(index: Index, name: str) -> bool:
    namespace, _, rest = name.partition(".")
    cluster, _, uid = rest.partition(".")
    key = ClusterKey(namespace, cluster)
    record = index.cluster(key)
    if record is not None and record.uid == uid:
        return True
    if any(observed_object(one.ref, one.live()).owner_uid == uid for one in _workloads(index, key)):
        return True
    # Pods do not say which cluster of this name they belonged to; with another one there they are its own.
    return record is None and any(one.pod is not None for one in index.of(key))


def _workloads(index: Index, key: ClusterKey) -> list[Record]:
    return [one for one in index.of(key) if one.ref.kind in WORKLOAD_KINDS]
