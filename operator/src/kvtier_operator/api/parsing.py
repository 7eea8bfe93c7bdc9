"""The one parser of a KVCacheCluster: an untyped document becomes records, or all its violations at once. Pure.

Bytes and durations are read here; defaults that are flags of the engine come from `contract.WorkerSettings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.api.records import (
    API_VERSION,
    KIND,
    PACKAGED_MODEL_URI,
    KVCacheCluster,
    Master,
    Model,
    PortRange,
    Protocol,
    Role,
    RoleType,
    StoreKind,
    StorePool,
    Tiers,
    Transport,
)
from kvtier_operator.engine_settings import read_settings
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.reading import Reader

DEFAULTS = WorkerSettings()
MIN_SEGMENT_BYTES = 16 * 2**20
"""Mooncake refuses smaller segments."""

FIRST_PORT, LAST_PORT = 1024, 65535


def parse(document: Any) -> KVCacheCluster:
    """Turn a manifest, as read from YAML or from the API server, into records.

    Raises:
        SpecError: with every violation.
    """
    violations: list[Violation] = []
    root = Reader(document, "", violations)
    _check_kind(root)
    metadata = root.child("metadata")  # the API server adds fields of its own to metadata and status
    root.values("status")
    name = metadata.label("name")
    spec = root.child("spec")
    cluster = KVCacheCluster(
        name=name,
        master=_master(spec.child("master")),
        pools=_pools(spec.child("store")),
        transport=_transport(spec.child("transport")),
        model=_model(spec.child("model")),
        roles=tuple(_role(role) for role in spec.children("roles")),
    )
    spec.finish()
    root.finish()
    violations += (*_check_roles(cluster), *_check_store(cluster))
    if violations:
        raise SpecError(violations)
    return cluster


def _check_kind(root: Reader) -> None:
    if root.text("apiVersion") != API_VERSION:
        root.reject("apiVersion", f"write {API_VERSION}")
    if root.text("kind") != KIND:
        root.reject("kind", f"write {KIND}")


def _master(reader: Reader) -> Master:
    master = Master(
        replicas=reader.integer("replicas", 1, minimum=1, maximum=1),
        lease_ttl_ms=reader.duration_ms("leaseTTL", 10_000, minimum=1000),
        client_ttl_ms=reader.duration_ms("clientTTL", 5_000, minimum=1000),
    )
    if master.client_ttl_ms % 1000:
        reader.reject("clientTTL", "write whole seconds")
    reader.finish()
    return master


def _pools(reader: Reader) -> tuple[StorePool, ...]:
    pools = tuple(_pool(pool) for pool in reader.children("pools"))
    reader.finish()
    return pools


def _pool(reader: Reader) -> StorePool:
    pool = StorePool(
        name=reader.label("name"),
        kind=reader.choice("kind", StoreKind.KVTIER),
        replicas=reader.integer("replicas", 1, minimum=1, maximum=1024),
        segment_bytes=reader.quantity("segmentSize", 0, minimum=MIN_SEGMENT_BYTES),
    )
    reader.finish()
    return pool


def _transport(reader: Reader) -> Transport:
    ports = reader.child("ports")
    span = ports.child("range")
    transport = Transport(
        protocol=reader.choice("protocol", Protocol.TCP, {"rdma": "rdma comes later"}),
        shared_memory=reader.boolean("sharedMemory", default=False),
        ports=PortRange(
            start=span.integer("start", 20000, FIRST_PORT, LAST_PORT),
            size=span.integer("size", 2000, 1, LAST_PORT),
        ),
    )
    if transport.ports.stop > LAST_PORT + 1:
        span.reject("size", f"start + size must not pass {LAST_PORT + 1}")
    for section in (span, ports, reader):
        section.finish()
    return transport


def _model(reader: Reader) -> Model:
    source, identity = reader.child("source"), reader.child("identity")
    model = Model(uri=source.text("uri"), id=identity.text("id"))
    remote = "://" in model.uri and not model.uri.startswith("file:///") and model.uri != PACKAGED_MODEL_URI
    if not model.uri or remote:
        fix = f"write a model folder (a path or file:///path), or {PACKAGED_MODEL_URI}; nothing is downloaded"
        source.reject("uri", fix)
    if not model.id:
        identity.reject("id", "write a name for these weights; use another one whenever they change")
    for section in (source, identity, reader):
        section.finish()
    return model


def _role(reader: Reader) -> Role:
    parallelism = reader.child("parallelism")
    role = Role(
        name=reader.label("name"),
        type=reader.choice(
            "type", RoleType.FUSED, dict.fromkeys((RoleType.PREFILL, RoleType.DECODE), "split roles come later")
        ),
        replicas=reader.integer("replicas", 1, minimum=1, maximum=64),
        tensor=parallelism.integer("tensor", 1, minimum=1, maximum=64),
        port=reader.integer("port", DEFAULTS.port, FIRST_PORT, LAST_PORT),
        tiers=_tiers(reader.child("tiers")),
        settings=read_settings(reader),
    )
    if role.name == "master" or role.name.split("-")[0] == "store":
        reader.reject("name", "taken by the cluster's own processes; write another name")
    parallelism.finish()
    reader.finish()
    return role


def _tiers(reader: Reader) -> Tiers:
    device, host, store = reader.child("device"), reader.child("host"), reader.child("store")
    prefetch = store.child("prefetch")
    tiers = Tiers(
        device_bytes=device.quantity("size", DEFAULTS.max_cache_size) if device.has("size") else 0,
        device_memory_fraction=device.decimal("memoryFraction", DEFAULTS.max_memory_utilization),
        host_blocks_factor=host.decimal("blocksFactor", DEFAULTS.host_blocks_factor),
        store_enabled=store.boolean("enabled", default=DEFAULTS.enable_kvcache_store),
        prefetch_batch=prefetch.integer("batch", DEFAULTS.prefetch_batch_size, minimum=1, maximum=4096),
        prefetch_timeout_ms=prefetch.duration_ms("timeout", DEFAULTS.prefetch_timeout),
    )
    if device.has("size") and device.has("memoryFraction"):
        device.reject("memoryFraction", "write either size or memoryFraction")
    if not 0 < tiers.device_memory_fraction <= 1:
        device.reject("memoryFraction", "write a fraction above 0 and at most 1")
    if tiers.store_enabled and tiers.host_blocks_factor <= 1:
        host.reject("blocksFactor", "write more than 1: the store tier is reached through host memory")
    for section in (device, host, prefetch, store, reader):
        section.finish()
    return tiers


def _check_roles(cluster: KVCacheCluster) -> Iterator[Violation]:
    if len(cluster.roles) != 1:
        names = [role.name for role in cluster.roles]
        yield Violation("spec.roles", names, "write exactly one role, of type Fused")
    for index, role in enumerate(cluster.roles):
        first, stop = role.port, role.port + role.replicas
        if first < cluster.transport.ports.stop and cluster.transport.ports.start < stop:
            fix = f"ports {first} to {stop - 1} lie in transport.ports.range; move one of them"
            yield Violation(f"spec.roles[{index}].port", role.port, fix)
        if stop - 1 > LAST_PORT:
            yield Violation(f"spec.roles[{index}].port", role.port, f"port + replicas must not pass {LAST_PORT + 1}")


def _check_store(cluster: KVCacheCluster) -> Iterator[Violation]:
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
