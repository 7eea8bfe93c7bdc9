"""The whole ``spec`` of a KVCacheCluster. Pure."""

from __future__ import annotations

from kvtier_operator.api.choices import Dialect, NamespacePolicy, Protocol
from kvtier_operator.api.fields import Boolean, Choice, Integer, Object, Rule, Text
from kvtier_operator.api.records import PACKAGED_MODEL_URI
from kvtier_operator.api.schema import rules
from kvtier_operator.api.schema.components import COORDINATION, MASTER, ROUTER, STORE
from kvtier_operator.api.schema.engines import ROLES
from kvtier_operator.api.schema.limits import FIRST_PORT, LAST_PORT
from kvtier_operator.api.schema.policies import DELETION, IMAGES, OBSERVABILITY, ROLLOUT, SECURITY

CLUSTER_ID_PATTERN = "([A-Za-z0-9]([-A-Za-z0-9._]{0,126}[A-Za-z0-9])?)?"
URI_FIX = (
    f"write a model folder (a path or file:///path), pvc://CLAIM/path, or {PACKAGED_MODEL_URI}; nothing is downloaded"
)
CLAIM_PATTERN = "pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/.*)?"

_TRANSPORT = Object(
    text="How engines reach storage nodes, and with which ports.",
    fields={
        "protocol": Choice(
            text="How blocks travel between machines.", default=Protocol.TCP, later={"rdma": "rdma comes later"}
        ),
        "sharedMemory": Boolean(
            text="Engines reach the storage node on their machine by shared memory. kvtier up only: pods share none.",
            default=False,
        ),
        "hostNetwork": Boolean(
            text="Pods use their node's addresses; their ports then never meet those of another such cluster.",
            default=False,
        ),
        "ports": Object(
            text="Ports of everything but the APIs.",
            fields={
                "range": Object(
                    text="Ports from start on; every process gets its own block of them, engines two: one for each of "
                    "two revisions.",
                    fields={
                        "start": Integer(text="First port.", default=20000, minimum=FIRST_PORT, maximum=LAST_PORT),
                        "size": Integer(text="How many.", default=2000, minimum=1, maximum=LAST_PORT),
                    },
                    rules=(
                        Rule(
                            "self.start + self.size <= 65536",
                            "start + size must not pass 65536",
                            path=".size",
                        ),
                    ),
                )
            },
        ),
    },
    rules=rules.TRANSPORT,
)
_MODEL = Object(
    text="Where the weights are, and what they are.",
    fields={
        "source": Object(
            text="Where the weights are.",
            fields={
                "uri": Text(
                    text="A folder of the machine or the image (a path or file:///path), a folder of a "
                    f"PersistentVolumeClaim (pvc://CLAIM/path, Kubernetes only), or {PACKAGED_MODEL_URI}. "
                    "Nothing is downloaded.",
                    pattern=".+",
                    advice=URI_FIX,
                    max_length=1024,
                    rules=(
                        Rule(
                            f"!self.contains('://') || self.startsWith('file:///') || self == '{PACKAGED_MODEL_URI}' "
                            f"|| self.matches('^{CLAIM_PATTERN}$')",
                            URI_FIX,
                        ),
                    ),
                )
            },
            required=("uri",),
        ),
        "identity": Object(
            text="What tells these weights from others: blocks in the store are found by it.",
            fields={
                "id": Text(
                    text="Name in the API, and of the namespace of store keys.",
                    pattern=".+",
                    advice="write a name for these weights; use another one whenever they change",
                ),
                "revision": Text(text="Revision of the weights, as in a commit or a date.", max_length=128),
                "weightsDigest": Text(text="Digest of the weights, as in sha256:...", max_length=256),
                "quantization": Text(text="How the weights are quantized, as in fp8.", max_length=64),
            },
            required=("id",),
        ),
        "namespacePolicy": Choice(
            text="Auto: keys carry the id and a short hash of revision, digest and quantization, as soon as one is "
            "given. Explicit: the id alone; whoever changes weights changes it.",
            default=NamespacePolicy.AUTO,
        ),
    },
    required=("source", "identity"),
)

SPEC = Object(
    text="What should run.",
    fields={
        "paused": Boolean(text="Change no child; only observe.", default=False),
        "clusterID": Text(
            text="Name under which masters elect and clients find them. Default: <namespace>.<name>. Chosen when "
            "the cluster is made, or never.",
            pattern=CLUSTER_ID_PATTERN,
            advice="write letters, digits, dashes, dots and underscores, 128 characters at most",
            max_length=128,
        ),
        "engine": Object(
            text="Which engine the pods run.",
            fields={
                "dialect": Choice(
                    text="Kvtier: kvtier engine, Fused roles only. Xllm: images of xLLM, split roles too.",
                    default=Dialect.KVTIER,
                )
            },
        ),
        "images": IMAGES,
        "coordination": COORDINATION,
        "master": MASTER,
        "store": STORE,
        "transport": _TRANSPORT,
        "model": _MODEL,
        "roles": ROLES,
        "router": ROUTER,
        "rollout": ROLLOUT,
        "security": SECURITY,
        "observability": OBSERVABILITY,
        "deletion": DELETION,
    },
    required=("model", "roles"),
    rules=rules.SPEC,
)
METADATA = Object(
    text="Name and the like.",
    fields={
        "name": Text(
            text="Name of the cluster.",
            pattern="[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
            advice="write a name of lower-case letters, digits and dashes that starts with a letter, 63 characters at "
            "most",
        ),
        "namespace": Text(text="Where it lives.", default="default"),
        "uid": Text(text="Set by the API server."),
        "generation": Integer(text="Set by the API server.", default=0, maximum=2**63 - 1),
    },
    required=("name",),
)
DOCUMENT = Object(
    text="A cluster of LLM engines that share a KV cache of three tiers: device, host, Mooncake Store.",
    fields={
        "apiVersion": Text(text="kvtier.dev/v1alpha1", default=""),
        "kind": Text(text="KVCacheCluster", default=""),
        "metadata": METADATA,
        "spec": SPEC,
        "status": Object(text="Written by the operator.", fields={}),
    },
    rules=rules.DOCUMENT,
)
