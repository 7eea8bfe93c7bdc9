"""Ports of clusters on the host network, any two of which may meet on a node. Pure; called by `rules`.

The ledger keeps blocks apart even where two ranges overlap. What it cannot move are the roles' HTTP ports, which users
chose: they must differ, and stand outside of everybody's range. A router is not on the host network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvtier_operator.api import KVCacheCluster
from kvtier_operator.errors import Violation
from kvtier_operator.planning.ports import PortBlock


def host_port_violations(cluster: KVCacheCluster, others: Iterable[KVCacheCluster]) -> Iterator[Violation]:
    """Each HTTP port of the cluster that another one has, and each of another one's in its range."""
    if not cluster.transport.host_network:
        return
    mine, span = dict(_api_ports(cluster)), _range(cluster)
    for other in others:
        name, theirs = _name(other), _range(other)
        for path, block in mine.items():
            if block.meets(theirs):
                fix = f"lies in the range {theirs} of {name}, which is on the host network too; write another port"
                yield Violation(path, block.start, fix)
            for path_there, taken in _api_ports(other):
                if block.meets(taken):
                    fix = f"is {path_there} of {name}, which is on the host network too; write another port"
                    yield Violation(path, block.start, fix)
        for path_there, taken in _api_ports(other):
            if taken.meets(span):
                fix = f"{taken} is {path_there} of {name}, which is on the host network too; move the range"
                yield Violation("spec.transport.ports.range", str(span), fix)


def host_port_warnings(cluster: KVCacheCluster, others: Iterable[KVCacheCluster]) -> Iterator[str]:
    """Ranges that overlap: safe, but one cluster can use up what the other one needs."""
    if not cluster.transport.host_network:
        return
    sharing = [f"{_name(other)} ({_range(other)})" for other in others if _range(cluster).meets(_range(other))]
    if sharing:
        yield f"spec.transport.ports.range {_range(cluster)} is shared with {', '.join(sharing)}; ports may run out"


def _range(cluster: KVCacheCluster) -> PortBlock:
    return PortBlock(cluster.transport.ports.start, cluster.transport.ports.stop)


def _api_ports(cluster: KVCacheCluster) -> Iterator[tuple[str, PortBlock]]:
    for index, role in enumerate(cluster.roles):
        yield f"spec.roles[{index}].port", PortBlock(role.port, role.port + cluster.api_width(role))


def _name(cluster: KVCacheCluster) -> str:
    return f"{cluster.metadata.namespace}/{cluster.name}"
