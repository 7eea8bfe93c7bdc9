"""Rules that need more than the description of the API: what an engine takes, and what fits into memory. Pure.

The door (`webhook`) and every pass hold a KVCacheCluster against the same ones, so that one which came in while the
door was open is found all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from kvtier_operator.api import Dialect, KVCacheCluster, PodOptions, Role, StorePool, parse
from kvtier_operator.api.units import parse_amount
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.planning.ports import MASTER_PORTS, PortBlock, engine_ports
from kvtier_operator.resources.engine import EnginePlace, StoreAddresses, engine_settings
from kvtier_operator.resources.master import master_address


def accept(document: Any) -> KVCacheCluster:
    """Turn a manifest into records, if it keeps every rule that one object can be held against.

    Raises:
        SpecError: with every violation.
    """
    cluster = parse(document)
    if found := violations(cluster):
        raise SpecError(found)
    return cluster


def violations(cluster: KVCacheCluster) -> tuple[Violation, ...]:
    """What the parser cannot see, in the order of the manifest."""
    found: list[Violation] = []
    for index, pool in enumerate(cluster.pools):
        found += _segment(f"spec.store.pools[{index}]", pool)
    for index, role in enumerate(cluster.roles):
        found += _settings(f"spec.roles[{index}]", cluster, role)
        found += _host_tier(f"spec.roles[{index}]", role)
    return tuple(found)


def on_host_network(document: Mapping[str, Any]) -> bool:
    """True when a manifest, valid or not, says that its pods use their nodes' addresses."""
    match document:
        case {"spec": {"transport": {"hostNetwork": True}}}:
            return True
        case _:
            return False


def _segment(path: str, pool: StorePool) -> Iterator[Violation]:
    limit = _memory_limit(pool.pod)
    if limit is not None and limit <= pool.segment_bytes:
        fix = f"the node gives {pool.segment_bytes} bytes (segmentSize) to the store and needs more itself; write more"
        yield Violation(f"{path}.pod.resources.limits.memory", _stated_limit(pool.pod), fix)


def _host_tier(path: str, role: Role) -> Iterator[Violation]:
    limit, host_bytes = _memory_limit(role.pod), role.tiers.host_bytes * role.tensor
    if host_bytes and limit is not None and limit <= host_bytes:
        fix = f"the host tier alone takes {host_bytes} bytes (device size x blocksFactor x ranks); write more"
        yield Violation(f"{path}.pod.resources.limits.memory", _stated_limit(role.pod), fix)


def _settings(path: str, cluster: KVCacheCluster, role: Role) -> Iterator[Violation]:
    """What the engine would refuse when it starts; xLLM's own rules are not known here."""
    if cluster.dialect is not Dialect.KVTIER:
        return
    first = cluster.transport.ports.start
    ports = PortBlock(first, first + engine_ports(role).width)
    place = EnginePlace("/models", ports, role.port, api_host="0.0.0.0", store_host="engine")  # noqa: S104 - of the pod
    endpoints = ("etcd:2379",) if cluster.coordination.uses_etcd else ()
    master = master_address(cluster, "master", PortBlock(first, first + MASTER_PORTS), endpoints)
    for refusal in engine_settings(cluster, role, place, StoreAddresses(master)).violations():
        yield Violation(path, role.name, refusal)


def _stated_limit(pod: PodOptions) -> object:
    return (pod.resources.get("limits") or {}).get("memory")


def _memory_limit(pod: PodOptions) -> Fraction | None:
    return parse_amount(_stated_limit(pod))
