"""The field ``pod`` of every component: what its pods get beyond what the operator decides. Pure."""

from __future__ import annotations

from kvtier_operator.api.fields import (
    NAME_ADVICE,
    NAME_PATTERN,
    OBJECT_NAME_ADVICE,
    OBJECT_NAME_PATTERN,
    Amounts,
    Free,
    FreeList,
    Object,
    Rule,
    Text,
    TextMap,
)

OWNED_LABELS = (
    "apps.kubernetes.io/pod-index",
    "controller-revision-hash",
    "pod-template-hash",
    "statefulset.kubernetes.io/pod-name",
)
OWNED_PREFIXES = ("app.kubernetes.io/", "kvtier.dev/")
ENV_PREFIXES = ("KVTIER_", "MC_", "POD_")
API_KEY_VARIABLE = "KVTIER_API_KEY"
OWNED_VOLUME_PREFIX = "kvtier-"
OWNED_MOUNTS = ("/dev/shm", "/etc/kvtier", "/tmp")  # noqa: S108 - a path in a container

LABELS_FIX = "the operator sets labels of app.kubernetes.io/ and kvtier.dev/ and those of workloads; use another name"
ANNOTATIONS_FIX = "the operator sets annotations of kvtier.dev/; use another name"
ENV_FIX = "the operator sets variables that start with KVTIER_, MC_ or POD_ (KVTIER_API_KEY is yours); remove them"
VOLUME_FIX = "names that start with kvtier- are the operator's; use another name"
MOUNT_FIX = f"{', '.join(OWNED_MOUNTS)} are the operator's; mount elsewhere"


def _no_prefix(name: str, prefixes: tuple[str, ...]) -> str:
    return " && ".join(f"!{name}.startsWith('{prefix}')" for prefix in prefixes)


def _quoted(texts: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{text}'" for text in texts) + "]"


def _object(text: str) -> Text:
    return Text(text=text, pattern=OBJECT_NAME_PATTERN, advice=OBJECT_NAME_ADVICE)


_RESOURCES = Object(
    text="Resources of the container, as in a pod. Without it the operator asks for the memory that it knows of.",
    fields={
        "requests": Amounts(text="What the node must have free, by resource, as in cpu: 500m or memory: 4Gi."),
        "limits": Amounts(text="What the container may use at most, by resource; also devices, as in nvidia.com/gpu."),
    },
    rules=(
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
            "!isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k])) || "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            "a request is larger than its limit; lower it or raise the limit",
            path=".requests",
        ),
    ),
)
_VOLUME = Object(
    text="One volume.",
    fields={
        "name": Text(
            text="Name that volumeMounts use.",
            pattern=NAME_PATTERN,
            advice=NAME_ADVICE,
            max_length=63,
            rules=(Rule(f"!self.startsWith('{OWNED_VOLUME_PREFIX}')", VOLUME_FIX),),
        )
    },
    required=("name",),
)
_MOUNT = Object(
    text="One mount.",
    fields={
        "name": Text(text="Name of one of the volumes.", max_length=63, pattern=".+"),
        "mountPath": Text(
            text="Folder in the container.",
            pattern="/.*",
            advice="write a path that starts with /",
            max_length=512,
            rules=(
                Rule(
                    " && ".join(f"self != '{path}' && !self.startsWith('{path}/')" for path in OWNED_MOUNTS), MOUNT_FIX
                ),
            ),
        ),
    },
    required=("name", "mountPath"),
)

POD = Object(
    text="What the pods get beyond what the operator decides. Kubernetes only.",
    fields={
        "resources": _RESOURCES,
        "nodeSelector": TextMap(text="Labels that a node must have.", max_items=32, max_length=63),
        "tolerations": FreeList(
            text="Taints of nodes that the pods accept, as in a pod.",
            item=Object(text="One toleration.", fields={}),
        ),
        "affinity": Free(text="Affinity as in a pod; the operator's own anti-affinity is added to it."),
        "annotations": TextMap(
            text="Annotations of the pods.",
            max_items=32,
            max_length=4096,
            rules=(Rule(f"self.all(k, {_no_prefix('k', ('kvtier.dev/',))})", ANNOTATIONS_FIX),),
        ),
        "labels": TextMap(
            text="Labels of the pods.",
            max_items=32,
            max_length=63,
            rules=(
                Rule(
                    f"self.all(k, !(k in {_quoted(OWNED_LABELS)}) && {_no_prefix('k', OWNED_PREFIXES)})",
                    LABELS_FIX,
                ),
            ),
        ),
        "env": TextMap(
            text="Environment of the container. KVTIER_API_KEY is the key that clients of the engines must present.",
            max_items=64,
            max_length=4096,
            rules=(Rule(f"self.all(k, k == '{API_KEY_VARIABLE}' || ({_no_prefix('k', ENV_PREFIXES)}))", ENV_FIX),),
        ),
        "priorityClass": _object("Name of a PriorityClass."),
        "runtimeClass": _object("Name of a RuntimeClass, as in nvidia."),
        "serviceAccount": _object("Name of a ServiceAccount to use instead of the operator's."),
        "volumes": FreeList(text="Volumes as in a pod, for weights, certificates and the like.", item=_VOLUME),
        "volumeMounts": FreeList(text="Where the container sees these volumes, as in a pod.", item=_MOUNT),
    },
    rules=(
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && "
            "self.volumes.exists(v, v.name == m.name))",
            "a mount names no volume of pod.volumes; add the volume",
            path=".volumeMounts",
        ),
    ),
)
