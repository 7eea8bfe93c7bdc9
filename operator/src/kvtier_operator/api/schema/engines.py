"""The engines: roles, their cache tiers and their flags. Pure."""

from __future__ import annotations

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.api.choices import RoleType
from kvtier_operator.api.fields import (
    NAME_ADVICE,
    NAME_PATTERN,
    Boolean,
    Bytes,
    Choice,
    Decimal,
    Duration,
    Integer,
    Object,
    ObjectList,
    Rule,
    Settings,
    Text,
)
from kvtier_operator.api.schema.limits import FIRST_PORT, LAST_PORT, MAX_ROLES, TAKEN_ROLE_NAMES
from kvtier_operator.api.schema.pod import POD
from kvtier_operator.api.units import duration_text

_FLAGS = WorkerSettings()
_TAKEN = "[" + ", ".join(f"'{name}'" for name in TAKEN_ROLE_NAMES) + "]"
TAKEN_FIX = "taken by the cluster's own processes; write another name"

_DEVICE = Object(
    text="First tier: memory of the engine's devices.",
    fields={
        "size": Bytes(text="Bytes of the device cache of each worker. Default: from memoryFraction."),
        "memoryFraction": Decimal(
            text="Fraction of the device's memory for weights and cache together, above 0 and at most 1. Not beside "
            f"size. Default: {_FLAGS.max_memory_utilization:g} without size.",
            default=format(_FLAGS.max_memory_utilization, "g"),
            persisted=False,
        ),
    },
    rules=(
        Rule(
            "!has(self.size) || !has(self.memoryFraction)",
            "write either size or memoryFraction",
            path=".memoryFraction",
        ),
        Rule(
            "!has(self.memoryFraction) || !isQuantity(string(self.memoryFraction)) || "
            "(quantity(string(self.memoryFraction)).isGreaterThan(quantity('0')) && "
            "!quantity(string(self.memoryFraction)).isGreaterThan(quantity('1')))",
            "write a fraction above 0 and at most 1",
            path=".memoryFraction",
        ),
    ),
)
_HOST = Object(
    text="Second tier: pinned memory of the host.",
    fields={
        "blocksFactor": Decimal(
            text='Host blocks for each device block, as in "2.5"; 1 or less = no host tier.',
            default=format(_FLAGS.host_blocks_factor, "g"),
        )
    },
)
_PREFETCH = Object(
    text="How blocks come from the store before a request starts.",
    fields={
        "batch": Integer(
            text="Logical blocks per prefetch batch.", default=_FLAGS.prefetch_batch_size, minimum=1, maximum=4096
        ),
        "timeout": Duration(
            text="After this long no further batch is issued, and the rest is computed; 0s = never.",
            default=duration_text(_FLAGS.prefetch_timeout),
        ),
    },
)
TIERS = Object(
    text="The cache tiers of an engine.",
    fields={
        "device": _DEVICE,
        "host": _HOST,
        "store": Object(
            text="Third tier: the store that all engines share.",
            fields={
                "enabled": Boolean(text="Use the store; needs the host tier.", default=_FLAGS.enable_kvcache_store),
                "prefetch": _PREFETCH,
            },
        ),
    },
    rules=(
        Rule(
            "!self.store.enabled || !isQuantity(string(self.host.blocksFactor)) || "
            "quantity(string(self.host.blocksFactor)).isGreaterThan(quantity('1'))",
            "write more than 1: the store tier is reached through host memory",
            expression="'is ' + string(self.host.blocksFactor) + '; write more than 1: the store tier is reached "
            "through host memory'",
            path=".host.blocksFactor",
        ),
    ),
)
ROLE = Object(
    text="Engines that do the same work.",
    fields={
        "name": Text(
            text="Name of the role; its Service is <cluster>-<name>.",
            pattern=NAME_PATTERN,
            advice=NAME_ADVICE,
            max_length=41,
            rules=(Rule(f"!(self in {_TAKEN}) && !self.startsWith('store-')", TAKEN_FIX),),
        ),
        "type": Choice(
            text="Fused: prefill and decode in one engine. Prefill, Decode: engines that share the work "
            "(engine.dialect Xllm, with a router).",
            default=RoleType.FUSED,
        ),
        "replicas": Integer(text="Engines; 0 rests the role.", default=1, maximum=256),
        "parallelism": Object(
            text="How an engine is divided among workers.",
            fields={"tensor": Integer(text="Tensor-parallel workers.", default=1, minimum=1, maximum=64)},
        ),
        "port": Integer(
            text="Port of the engines' API. Where engines share an address (kvtier up), engine i serves on port + i.",
            default=_FLAGS.port,
            minimum=FIRST_PORT,
            maximum=LAST_PORT,
        ),
        "tiers": TIERS,
        "settings": Settings(text="Flags of the engine that no other field decides, by their names in docs/flags.md."),
        "shm": Object(
            text="Shared memory of a pod.",
            fields={
                "size": Bytes(text="Limit of the memory volume at /dev/shm; counts as the pod's memory.", default="1Gi")
            },
        ),
        "termination": Object(
            text="How an engine stops.",
            fields={
                "graceSeconds": Integer(
                    text="Seconds from SIGTERM to SIGKILL; 0 = the engine's drain_timeout and a margin.",
                    default=0,
                    maximum=86_400,
                )
            },
        ),
        "pod": POD,
    },
    required=("name",),
    rules=(
        Rule(
            "self.type == 'Fused' || self.tiers.store.enabled",
            "Prefill and Decode hand blocks over through the store; write tiers.store.enabled: true",
            expression="self.type + ' hands blocks over through the store; write tiers.store.enabled: true'",
            path=".tiers.store.enabled",
        ),
    ),
)
ROLES = ObjectList(
    text="The engines by what they do: either Fused roles only, or at least one Prefill and one Decode.",
    item=ROLE,
    key="name",
    min_items=1,
    max_items=MAX_ROLES,
    rules=(
        Rule(
            "self.all(r, r.type == 'Fused') || (self.all(r, r.type != 'Fused') && self.exists(r, r.type == 'Prefill') "
            "&& self.exists(r, r.type == 'Decode'))",
            "write only Fused roles, or at least one Prefill and one Decode and no Fused",
        ),
    ),
)
