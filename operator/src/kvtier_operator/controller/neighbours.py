"""The other clusters of the host network's ledger: what they use when it is lost, and which of them are gone. Pure.

A cluster on the pod network has a ledger to itself, which its own pass makes again and the garbage collector takes
away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier_operator.controller.index import ClusterKey, Index, Record
from kvtier_operator.observed import Manifest, ObjectRef, ObservedObject
from kvtier_operator.planning.in_use import stated_blocks
from kvtier_operator.planning.ledger import BlockKey, Ledger, owner
from kvtier_operator.planning.ports import PortBlock

AsObject = Callable[[ObjectRef, Manifest], ObservedObject]

_WORKLOADS = frozenset({"StatefulSet", "Deployment"})


def blocks_of_all(index: Index, as_object: AsObject) -> Mapping[BlockKey, PortBlock]:
    """Blocks in use on the host network, as workloads of every cluster there state them.

    Args:
        index: knows all clusters.
        as_object: a live object as plans see it.
    """
    found: dict[BlockKey, PortBlock] = {}
    for key in index.clusters():
        record = index.cluster(key)
        if record is not None and _on_host_network(record.live()):
            own = [as_object(one.ref, one.live()) for one in _workloads(index, key)]
            own = [one for one in own if one.owner_uid == record.uid]
            pods = [one.pod.observed(one.ref.name, one.uid, None, 0.0) for one in index.of(key) if one.pod is not None]
            found |= stated_blocks(owner(*key, record.uid), own, pods)
    return found


def gone_owners(index: Index, ledger: Ledger, as_object: AsObject) -> frozenset[str]:
    """Owners in the ledger of whom nothing is left: neither the cluster, nor a workload, nor a pod."""
    return frozenset(name for name in ledger.clusters if not _is_there(index, name, as_object))


def _is_there(index: Index, name: str, as_object: AsObject) -> bool:
    namespace, _, rest = name.partition(".")
    cluster, _, uid = rest.partition(".")
    key = ClusterKey(namespace, cluster)
    record = index.cluster(key)
    if record is not None and record.uid == uid:
        return True
    if any(as_object(one.ref, one.live()).owner_uid == uid for one in _workloads(index, key)):
        return True
    # Pods do not say which cluster of this name they belonged to; with another one there they are its own.
    return record is None and any(one.pod is not None for one in index.of(key))


def _workloads(index: Index, key: ClusterKey) -> list[Record]:
    return [one for one in index.of(key) if one.ref.kind in _WORKLOADS]


def _on_host_network(manifest: Manifest) -> bool:
    match manifest:
        case {"spec": {"transport": {"hostNetwork": True}}}:
            return True
        case _:
            return False
