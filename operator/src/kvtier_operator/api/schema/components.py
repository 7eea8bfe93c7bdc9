"""What stands beside the engines: coordination, masters, store, router. Pure."""

from __future__ import annotations

from kvtier_operator.api.choices import DrainMode, DrainTimeout, Durability, StoreKind
from kvtier_operator.api.fields import (
    NAME_ADVICE,
    NAME_PATTERN,
    Bytes,
    Choice,
    Duration,
    Integer,
    Object,
    ObjectList,
    Rule,
    Text,
    TextList,
)
from kvtier_operator.api.schema.limits import FIRST_PORT, LAST_PORT, MIN_SEGMENT_BYTES
from kvtier_operator.api.schema.pod import POD
from kvtier_operator.api.units import DURATION_PATTERN

ENDPOINT_PATTERN = r"([A-Za-z0-9]([-A-Za-z0-9.]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:]{2,39}\]):[0-9]{1,5}"

_STORAGE = Object(
    text="A volume for each member. Without it the data lives as long as the pod. Cannot be changed later.",
    optional=True,
    fields={
        "size": Bytes(text="Size of the volume, as in 10Gi.", minimum=64 * 2**20),
        "class": Text(text="Name of a StorageClass; none = the cluster's default."),
    },
    required=("size",),
)
_MANAGED = Object(
    text="An etcd that the operator runs, as <cluster>-etcd.",
    optional=True,
    fields={
        "replicas": Integer(
            text="Members: 1, 3 or 5. A majority must live. Cannot be changed later.",
            default=3,
            minimum=1,
            maximum=5,
            choices=(1, 3, 5),
        ),
        "storage": _STORAGE,
        "pod": POD,
    },
    rules=(
        Rule(
            "self.replicas == oldSelf.replicas",
            "members join an etcd only when it is made; keep the number, or make another cluster",
            path=".replicas",
        ),
        Rule(
            "has(self.storage) == has(oldSelf.storage) && (!has(self.storage) || self.storage == oldSelf.storage)",
            "volumes of a running etcd cannot be changed; keep them as they were, or make another cluster",
        ),
    ),
)
_EXTERNAL = Object(
    text="An etcd that somebody else runs.",
    optional=True,
    fields={
        "endpoints": TextList(
            text="Its members, host:port each.",
            item=Text(
                text="host:port",
                pattern=ENDPOINT_PATTERN,
                advice="write host:port without http://, as in etcd-0.etcd:2379",
                max_length=262,
            ),
            min_items=1,
            max_items=9,
        ),
    },
    required=("endpoints",),
)
COORDINATION = Object(
    text="Which etcd elects the leading master. None: there is one master, and its index dies with it.",
    fields={
        "etcd": Object(
            text="The etcd: either external or managed.",
            optional=True,
            fields={"external": _EXTERNAL, "managed": _MANAGED},
            rules=(
                Rule("has(self.external) != has(self.managed)", "write either external or managed"),
                Rule(
                    "has(self.managed) == has(oldSelf.managed)",
                    "masters would forget every object; keep the kind of etcd, or make another cluster",
                ),
            ),
        )
    },
)
MASTER = Object(
    text="The Mooncake masters, which know where every object of the store is.",
    fields={
        "replicas": Integer(
            text="One leads, the others stand by. More than one needs coordination.etcd.",
            default=1,
            minimum=1,
            maximum=9,
        ),
        "durability": Choice(
            text="What of the masters' index survives a failover. None: nothing, the next leader starts empty. OpLog: "
            "everything, each change is in etcd before it is answered. Default: OpLog with coordination.etcd, else "
            "None.",
            default=Durability.NONE,
            persisted=False,
        ),
        "leaseTTL": Duration(
            text="How long a probe or read protects an object from eviction.", default="10s", minimum=1000
        ),
        "clientTTL": Duration(
            text="How long a storage node may be silent before its objects are dropped; whole seconds.",
            default="5s",
            minimum=1000,
            rules=(
                Rule(
                    f"!self.matches('^{DURATION_PATTERN}$') || duration(self).getMilliseconds() % 1000 == 0",
                    "write whole seconds",
                ),
            ),
        ),
        "pod": POD,
    },
)
_DRAIN = Object(
    text="How a storage node leaves when its pool shrinks or its pod is replaced.",
    fields={
        "mode": Choice(
            text="Migrate: the leader moves its objects to other nodes first; where the running master cannot, as "
            "Discard. Discard: it unmounts gracefully, later reads of its objects are misses.",
            default=DrainMode.MIGRATE,
        ),
        "timeout": Duration(text="How long moving may take.", default="10m", minimum=1000),
        "onTimeout": Choice(
            text="Pause: keep the node and say so (condition DrainBlocked). Force: stop it with what is left.",
            default=DrainTimeout.PAUSE,
        ),
    },
)
_POOL = Object(
    text="Storage nodes of one kind and size.",
    fields={
        "name": Text(
            text="Name of the pool; its nodes are <cluster>-store-<name>-0, -1 and so on.",
            pattern=NAME_PATTERN,
            advice=NAME_ADVICE,
            max_length=40,
        ),
        "kind": Choice(
            text="Which program holds the memory. Kvtier: kvtier store, whose planned stop costs no failed read. "
            "MooncakeClient: Mooncake's own mooncake_client.",
            default=StoreKind.KVTIER,
        ),
        "replicas": Integer(text="Storage nodes; 0 rests the pool.", default=1, maximum=1024),
        "segmentSize": Bytes(
            text="Memory that each node gives to the store, at least 16Mi.", minimum=MIN_SEGMENT_BYTES
        ),
        "drain": _DRAIN,
        "pod": POD,
    },
    required=("name", "segmentSize"),
)
STORE = Object(
    text="The third tier: memory of storage nodes that all engines share.",
    fields={
        "pools": ObjectList(
            text="Pools of storage nodes, by name.",
            item=_POOL,
            key="name",
            max_items=8,
        )
    },
)
ROUTER = Object(
    text="Router in front of Prefill and Decode engines (engine.dialect Xllm). None: clients call the engines.",
    optional=True,
    fields={
        "replicas": Integer(text="Routers; 0 rests them.", default=1, maximum=64),
        "port": Integer(text="Port of its OpenAI API.", default=8888, minimum=FIRST_PORT, maximum=LAST_PORT),
        "pod": POD,
    },
)
