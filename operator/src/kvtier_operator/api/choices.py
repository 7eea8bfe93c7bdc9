"""Fields of a KVCacheCluster that take one of several words. Pure."""

from __future__ import annotations

from enum import StrEnum


class Dialect(StrEnum):
    """Which engine the pods run; both take the flags of `contract.WorkerSettings`."""

    KVTIER = "Kvtier"
    """`kvtier engine` of the worker image. Fused roles only."""
    XLLM = "Xllm"
    """xLLM images: the same flags and those of prefill/decode disaggregation, with `xllm_master_serving` as router."""


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
    PREFILL = "Prefill"
    DECODE = "Decode"


class Durability(StrEnum):
    """What of the masters' metadata survives a failover."""

    NONE = "None"
    """Nothing: the next leader starts with an empty index."""
    OPLOG = "OpLog"
    """Everything: each change is in etcd before it is answered."""


class DrainMode(StrEnum):
    """What happens to a storage node's objects before it stops."""

    MIGRATE = "Migrate"
    """A drain job of the master moves them to other nodes; where the running master has none, Discard."""
    DISCARD = "Discard"
    """The node unmounts gracefully: later reads are misses, never errors."""


class DrainTimeout(StrEnum):
    """What happens when a drain takes longer than it may."""

    PAUSE = "Pause"
    FORCE = "Force"


class RolloutPolicy(StrEnum):
    """Who starts a rollout of a new revision."""

    AUTOMATIC = "Automatic"
    SUPERVISED = "Supervised"
    """It waits for the annotation ``kvtier.dev/approve=REVISION``."""


class PullPolicy(StrEnum):
    """When a node fetches an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class NamespacePolicy(StrEnum):
    """How the namespace of store keys (`--model_id`) follows the model's identity."""

    AUTO = "Auto"
    """The id, and a short hash of revision, digest and quantization as soon as one of them is given."""
    EXPLICIT = "Explicit"
    """The id as it stands; whoever changes weights changes it."""


class DeletionPolicy(StrEnum):
    """How a deleted cluster goes."""

    IMMEDIATE = "Immediate"
    """Owner references only: everything at once, also without the operator."""
    DRAIN = "Drain"
    """A finalizer holds the object until router, engines, stores and masters have stopped in this order."""


class Truth(StrEnum):
    """Whether a condition of the status holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Monitoring(StrEnum):
    """Whether objects of the Prometheus operator are made."""

    AUTO = "Auto"
    """When their definitions exist in the cluster."""
    NEVER = "Never"
