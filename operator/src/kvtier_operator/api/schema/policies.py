"""Images and the policies of a cluster: rollout, security, observability, deletion. Pure."""

from __future__ import annotations

from kvtier_operator.api.choices import DeletionPolicy, Monitoring, PullPolicy, RolloutPolicy
from kvtier_operator.api.fields import (
    OBJECT_NAME_ADVICE,
    OBJECT_NAME_PATTERN,
    Boolean,
    Choice,
    Integer,
    Object,
    ObjectList,
    Text,
    TextMap,
)
from kvtier_operator.api.pods import DEFAULT_ETCD_IMAGE, DEFAULT_IMAGE

_IMAGE_PATTERN = r"\S+"
_IMAGE_ADVICE = "write an image without spaces, as in registry.example.org/kvtier-worker:0.1.0"


def _image(text: str, default: str | None = None) -> Text:
    return Text(text=text, default=default, pattern=_IMAGE_PATTERN, advice=_IMAGE_ADVICE, max_length=512)


IMAGES = Object(
    text="Images of the pods.",
    fields={
        "default": _image("kvtier's worker image: it has engine, storage node and master.", DEFAULT_IMAGE),
        "engine": _image("Of the engines; none = default."),
        "mooncake": _image("Of masters, and of storage nodes of kind MooncakeClient; none = default."),
        "router": _image("Of the router; none = that of the engines."),
        "etcd": _image("Of the managed etcd.", DEFAULT_ETCD_IMAGE),
        "pullPolicy": Choice(text="When a node fetches an image.", default=PullPolicy.IF_NOT_PRESENT),
        "pullSecrets": ObjectList(
            text="Secrets with credentials of registries.",
            item=Object(
                text="One Secret.",
                fields={"name": Text(text="Its name.", pattern=OBJECT_NAME_PATTERN, advice=OBJECT_NAME_ADVICE)},
                required=("name",),
            ),
            key="name",
            max_items=8,
        ),
    },
)
ROLLOUT = Object(
    text="How a new revision of the engines replaces the old one.",
    fields={
        "policy": Choice(
            text="Automatic: at once. Supervised: it waits for the annotation kvtier.dev/approve=<revision>.",
            default=RolloutPolicy.AUTOMATIC,
        ),
        "maxSurge": Integer(
            text="Units of engines beyond the wanted number meanwhile; 0 = replace in place. A unit is one Fused "
            "engine, or the smallest set of Prefill and Decode engines in the ratio of their replicas.",
            default=0,
            maximum=64,
        ),
    },
)
SECURITY = Object(
    text="Who may reach the pods.",
    fields={
        "networkPolicy": Object(
            text="NetworkPolicies of the cluster.",
            fields={
                "enabled": Boolean(
                    text="Only the cluster's own pods reach masters, storage nodes and etcd; everybody the APIs.",
                    default=True,
                ),
                "allowFrom": TextMap(
                    text="Labels of namespaces whose pods may scrape metrics; empty = all.", max_items=16, max_length=63
                ),
            },
        )
    },
)
OBSERVABILITY = Object(
    text="Objects for the Prometheus operator.",
    fields={
        "serviceMonitor": Choice(
            text="Auto: monitors are made where the cluster knows their kind. Never: none.", default=Monitoring.AUTO
        ),
        "alerts": Choice(
            text="Auto: a PrometheusRule is made where the cluster knows its kind. Never: none.",
            default=Monitoring.AUTO,
        ),
        "labels": TextMap(
            text="Labels of these objects; a Prometheus selects its monitors by label.", max_items=16, max_length=63
        ),
    },
)
DELETION = Object(
    text="How a deleted cluster goes.",
    fields={
        "policy": Choice(
            text="Immediate: everything at once, also without the operator. Drain: router, engines, storage nodes and "
            "masters stop in this order first; the object waits for the operator.",
            default=DeletionPolicy.IMMEDIATE,
        )
    },
)
