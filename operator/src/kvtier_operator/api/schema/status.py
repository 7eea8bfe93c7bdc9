"""The ``status`` of a KVCacheCluster, as the operator writes it. Pure.

Every number is recomputed from what runs on each pass.
"""

from __future__ import annotations

from kvtier_operator.api.choices import Truth
from kvtier_operator.api.fields import Integer, Object, ObjectList, Text, TextList
from kvtier_operator.api.schema.limits import MAX_ROLES

_COUNT_MAX = 2**31 - 1
_LONG = 32_768


def _word(text: str) -> Text:
    return Text(text=text, max_length=1024)


def _count(text: str) -> Integer:
    return Integer(text=text, default=0, maximum=_COUNT_MAX, persisted=False)


_CONDITIONS = ObjectList(
    text="What holds and what does not, by type; docs/conditions.md explains each.",
    item=Object(
        text="One condition.",
        fields={
            "type": _word("Name of the condition."),
            "status": Text(text="True, False or Unknown.", pattern="|".join(Truth)),
            "reason": _word("One word for programs."),
            "message": Text(text="What is so, of which object, and what to do next.", max_length=_LONG),
            "observedGeneration": Integer(
                text="Generation of the spec that it speaks of.", default=0, maximum=2**63 - 1, persisted=False
            ),
            "lastTransitionTime": _word("When its status changed last (RFC 3339)."),
        },
        required=("type", "status"),
    ),
    key="type",
    max_items=64,
    persisted=False,
)
_LEADER = Object(
    text="The master that leads.",
    fields={
        "pod": _word("Its pod."),
        "address": _word("Its address for clients, host:port."),
        "viewVersion": Integer(
            text="Version of the election that made it leader.", default=0, maximum=2**63 - 1, persisted=False
        ),
        "since": _word("Since when it leads (RFC 3339)."),
    },
)
_POOLS = ObjectList(
    text="Storage nodes, by pool.",
    item=Object(
        text="One pool.",
        fields={
            "name": _word("Its name."),
            "desired": _count("Nodes wanted."),
            "ready": _count("Nodes that serve."),
            "draining": ObjectList(
                text="Nodes that are leaving.",
                item=Object(
                    text="One node.",
                    fields={
                        "pod": _word("Its pod."),
                        "jobID": _word("Drain job of the leading master."),
                        "phase": _word("How far it is."),
                        "detail": _word("Moved and blocked units, or why it failed."),
                    },
                    required=("pod",),
                ),
                key="pod",
                max_items=1024,
                persisted=False,
            ),
        },
        required=("name",),
    ),
    key="name",
    max_items=64,
    persisted=False,
)
_ROLES = ObjectList(
    text="Engines, by role.",
    item=Object(
        text="One role.",
        fields={
            "name": _word("Its name."),
            "revision": _word("Revision that is wanted."),
            "desired": _count("Engines wanted."),
            "ready": _count("Engines that serve."),
            "updated": _count("Engines of the wanted revision."),
            "lane": _word("Which of the two sets of port blocks they use: A or B."),
            "ports": _word("First and last port of their blocks, as in 20000-20031."),
        },
        required=("name",),
    ),
    key="name",
    max_items=MAX_ROLES,
    persisted=False,
)

STATUS = Object(
    text="What runs, as the operator saw it last.",
    fields={
        "observedGeneration": Integer(
            text="Generation of the spec that this status speaks of.", default=0, maximum=2**63 - 1, persisted=False
        ),
        "phase": _word("The conditions in one word, as in Ready, RollingOut, Degraded, Idle, Paused or Failed."),
        "engines": _word("Engines that serve of those wanted, over all roles, as in 3/4."),
        "conditions": _CONDITIONS,
        "leader": _LEADER,
        "masters": Object(
            text="The masters.",
            fields={
                "desired": _count("Masters wanted."),
                "up": _count("Masters that answer."),
                "standbyCaughtUp": _count("Standbys that could lead without loss."),
            },
        ),
        "etcd": Object(
            text="The etcd that elects the leader.",
            fields={
                "mode": _word("External or Managed."),
                "desired": _count("Members wanted."),
                "ready": _count("Members that serve, as far as the operator runs them."),
            },
        ),
        "store": Object(
            text="The store.",
            fields={
                "ready": _word("Storage nodes that serve of those wanted, over all pools, as in 2/2."),
                "pools": _POOLS,
            },
        ),
        "roles": _ROLES,
        "revisions": Object(
            text="Revisions of the engines.",
            fields={
                "current": _word("Revision that serves."),
                "updating": _word("Revision that a rollout brings; empty = none."),
                "previous": TextList(
                    text="Revision before, kept for a way back.", item=_word("Revision."), max_items=10
                ),
            },
        ),
        "router": Object(
            text="The router.",
            fields={"desired": _count("Routers wanted."), "ready": _count("Routers that serve.")},
        ),
        "model": Object(
            text="The model as the store knows it.",
            fields={
                "effectiveID": _word("Namespace of the store's keys."),
                "previousIDs": TextList(
                    text="Namespaces used before, newest first.", item=_word("Namespace."), max_items=10
                ),
            },
        ),
    },
)
