"""Rules over several fields of a KVCacheCluster. Pure; `schema.rules` says the same in CEL where that can say it."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_operator.api.choices import Dialect, Durability, RoleType
from kvtier_operator.api.records import KVCacheCluster
from kvtier_operator.api.schema.limits import FIRST_NODE_PORT, LAST_NODE_PORT, LAST_PORT, MAX_SET_NAME, REVISION_LENGTH
from kvtier_operator.errors import Violation

_NODE_PORTS = (FIRST_NODE_PORT, LAST_NODE_PORT + 1)
_NODE_PORT_FIX = f"ports {FIRST_NODE_PORT} to {LAST_NODE_PORT} of a node are those of Services (NodePort); move it"
_ROUTER_PORT = "spec.router.port"
_LONGEST_FIXED_SUFFIX = len("-master")


def violations(cluster: KVCacheCluster) -> list[Violation]:
    """All of them, in the order of the manifest."""
    rules = (_names, _coordination, _store, _transport, _roles, _router, _ports)
    return [violation for rule in rules for violation in rule(cluster)]


def _names(cluster: KVCacheCluster) -> Iterator[Violation]:
    room = MAX_SET_NAME - len(cluster.name)
    if room < _LONGEST_FIXED_SUFFIX:
        fix = f"children add to it; write at most {MAX_SET_NAME - _LONGEST_FIXED_SUFFIX} characters"
        yield Violation("metadata.name", cluster.name, fix)
        return
    for index, pool in enumerate(cluster.pools):
        if len(f"-store-{pool.name}") > room:
            yield _too_long(f"spec.store.pools[{index}].name", pool.name, f"{cluster.name}-store-{pool.name}")
    for index, role in enumerate(cluster.roles):
        suffix = f"-{role.name}-{'x' * REVISION_LENGTH}"
        if len(suffix) > room:
            yield _too_long(f"spec.roles[{index}].name", role.name, f"{cluster.name}-{role.name}-REVISION")


def _too_long(path: str, name: str, child: str) -> Violation:
    return Violation(path, name, f"{child} may have {MAX_SET_NAME} characters; shorten this name or metadata.name")


def _coordination(cluster: KVCacheCluster) -> Iterator[Violation]:
    if cluster.coordination.uses_etcd:
        return
    if cluster.master.replicas > 1:
        fix = "several masters elect their leader in etcd; write coordination.etcd, or 1"
        yield Violation("spec.master.replicas", cluster.master.replicas, fix)
    if cluster.master.durability is not Durability.NONE:
        fix = "OpLog keeps the index in etcd; write coordination.etcd, or None"
        yield Violation("spec.master.durability", str(cluster.master.durability), fix)


def _store(cluster: KVCacheCluster) -> Iterator[Violation]:
    names = [pool.name for pool in cluster.pools]
    if len(set(names)) != len(names):
        yield Violation("spec.store.pools", names, "give every pool another name")
    if cluster.uses_store and not cluster.pools:
        yield Violation("spec.store.pools", names, "write at least one pool, or turn tiers.store.enabled off")
    if cluster.pools and not cluster.uses_store:
        fix = "no role uses the store; set tiers.store.enabled: true or remove the pools"
        yield Violation("spec.store.pools", names, fix)
    if cluster.transport.shared_memory and not cluster.uses_store:
        yield Violation("spec.transport.sharedMemory", True, "no role uses the store; write false")


def _transport(cluster: KVCacheCluster) -> Iterator[Violation]:
    transport = cluster.transport
    if not transport.host_network:
        return
    if transport.shared_memory:
        fix = "sharedMemory works only in kvtier up, hostNetwork only in Kubernetes; write false"
        yield Violation("spec.transport.sharedMemory", True, fix)
    if _meet((transport.ports.start, transport.ports.stop), _NODE_PORTS):
        yield Violation(
            "spec.transport.ports.range", f"{transport.ports.start}-{transport.ports.stop - 1}", _NODE_PORT_FIX
        )


def _roles(cluster: KVCacheCluster) -> Iterator[Violation]:
    names = [role.name for role in cluster.roles]
    if len(set(names)) != len(names):
        yield Violation("spec.roles", names, "give every role another name")
    types = {role.type for role in cluster.roles}
    split = types - {RoleType.FUSED}
    if split and types != {RoleType.PREFILL, RoleType.DECODE}:
        fix = "write only Fused roles, or at least one Prefill and one Decode and no Fused"
        yield Violation("spec.roles", [f"{role.name}: {role.type}" for role in cluster.roles], fix)
    if split and cluster.router is None:
        fix = "Prefill and Decode engines are reached through a router; write router: {}"
        yield Violation("spec.router", None, fix)
    for index, role in enumerate(cluster.roles):
        if role.type is RoleType.FUSED:
            continue
        if cluster.dialect is not Dialect.XLLM:
            fix = f"{role.type} needs engine.dialect: {Dialect.XLLM}; kvtier's own engine is Fused"
            yield Violation(f"spec.roles[{index}].type", str(role.type), fix)
        if not role.tiers.store_enabled:
            fix = f"{role.type} hands blocks over through the store; write tiers.store.enabled: true"
            yield Violation(f"spec.roles[{index}].tiers.store.enabled", False, fix)


def _router(cluster: KVCacheCluster) -> Iterator[Violation]:
    if cluster.router and cluster.dialect is not Dialect.XLLM:
        fix = f"the router needs engine.dialect: {Dialect.XLLM}; remove router, its clients call the engines' Service"
        yield Violation("spec.router", {}, fix)


def _ports(cluster: KVCacheCluster) -> Iterator[Violation]:
    """Ports of the APIs: apart from one another, and outside of what is reserved."""
    earlier: list[tuple[str, tuple[int, int]]] = []
    for path, owner, first, count in _api_ports(cluster):
        span = (first, first + count)
        last = span[1] - 1
        shown = f"port {first} lies" if first == last else f"ports {first} to {last} lie"
        if _meet(span, (cluster.transport.ports.start, cluster.transport.ports.stop)):
            yield Violation(path, first, f"{shown} in transport.ports.range; move one of them")
        if last > LAST_PORT:
            yield Violation(path, first, f"port + replicas must not pass {LAST_PORT + 1}")
        # A router has an address of its own.
        if cluster.transport.host_network and path != _ROUTER_PORT and _meet(span, _NODE_PORTS):
            yield Violation(path, first, _NODE_PORT_FIX)
        for other, taken in earlier:
            if _meet(span, taken):
                fix = f"{other} has ports {taken[0]} to {taken[1] - 1} (engine i has port + i); move one of them"
                yield Violation(path, first, fix)
        earlier.append((owner, span))


def _api_ports(cluster: KVCacheCluster) -> Iterator[tuple[str, str, int, int]]:
    """Path, owner, first port and number of ports of every API."""
    for index, role in enumerate(cluster.roles):
        count = max(role.replicas, cluster.api_width(role), 1)
        yield f"spec.roles[{index}].port", f"role {role.name}", role.port, count
    if cluster.router:
        yield _ROUTER_PORT, "the router", cluster.router.port, max(cluster.router.replicas, 1)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True when two half-open ranges share a number."""
    return one[0] < other[1] and other[0] < one[1]
