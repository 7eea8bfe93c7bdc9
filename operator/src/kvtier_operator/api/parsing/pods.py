"""The field ``pod`` of a component. Pure; called by the readers of components."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvtier_operator.api.pods import PodOptions
from kvtier_operator.api.reading import Reader
from kvtier_operator.api.schema import pod as described

_ENV_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_QUALIFIED_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def read_pod(component: Reader) -> PodOptions:
    """What a component's pods get; every name that the operator sets itself is refused."""
    reader = component.child("pod")
    return PodOptions(
        resources=_resources(reader.child("resources")),
        node_selector=read_labels(reader, "nodeSelector"),
        tolerations=reader.mappings("tolerations"),
        affinity=reader.values("affinity"),
        annotations=_annotations(reader),
        labels=_labels(reader),
        env=_env(reader),
        priority_class=reader.text("priorityClass"),
        runtime_class=reader.text("runtimeClass"),
        service_account=reader.text("serviceAccount"),
        volumes=_volumes(reader),
        volume_mounts=_mounts(reader),
    )


def read_labels(reader: Reader, name: str) -> Mapping[str, str]:
    """A mapping that goes into labels or selects by them."""
    labels = reader.text_map(name)
    for key, value in labels.items():
        if not _QUALIFIED_NAME.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            fix = "write a name as in example.org/team, and at most 63 letters, digits, dashes, dots and underscores"
            reader.reject_key(name, key, fix)
    return labels


def _resources(reader: Reader) -> Mapping[str, Any]:
    requests, limits = reader.amounts("requests"), reader.amounts("limits")
    for name, amount in requests.items():
        if amount > limits.get(name, amount):
            fix = f"a request is larger than its limit {limits[name]}; lower it or raise the limit"
            reader.reject_key("requests", name, fix)
    return {name: dict(reader.values(name)) for name in ("requests", "limits") if reader.values(name)}


def _annotations(reader: Reader) -> Mapping[str, str]:
    annotations = reader.text_map("annotations")
    for name in annotations:
        if name.startswith("kvtier.dev/"):
            reader.reject_key("annotations", name, described.ANNOTATIONS_FIX)
        elif not _QUALIFIED_NAME.fullmatch(name):
            reader.reject_key("annotations", name, "write a name as in example.org/team")
    return annotations


def _labels(reader: Reader) -> Mapping[str, str]:
    labels = read_labels(reader, "labels")
    for name in labels:
        if name in described.OWNED_LABELS or name.startswith(described.OWNED_PREFIXES):
            reader.reject_key("labels", name, described.LABELS_FIX)
    return labels


def _env(reader: Reader) -> Mapping[str, str]:
    env = reader.text_map("env")
    for name in env:
        if name != described.API_KEY_VARIABLE and name.startswith(described.ENV_PREFIXES):
            reader.reject_key("env", name, described.ENV_FIX)
        elif not _ENV_NAME.fullmatch(name):
            reader.reject_key("env", name, "write letters, digits and underscores, no digit first")
    return env


def _volumes(reader: Reader) -> tuple[Mapping[str, Any], ...]:
    volumes = reader.mappings("volumes")
    names = [volume["name"] for volume in volumes]
    for name in names:
        if name.startswith(described.OWNED_VOLUME_PREFIX):
            reader.reject("volumes", f"{name}: {described.VOLUME_FIX}")
    if len(set(names)) != len(names):
        reader.reject("volumes", "give every volume another name")
    return volumes


def _mounts(reader: Reader) -> tuple[Mapping[str, Any], ...]:
    mounts = reader.mappings("volumeMounts")
    volumes = [volume.get("name") for volume in reader.items("volumes") if isinstance(volume, Mapping)]
    for mount in mounts:
        path = mount["mountPath"].rstrip("/")
        if any(path == owned or path.startswith(f"{owned}/") for owned in described.OWNED_MOUNTS):
            reader.reject("volumeMounts", f"{path}: {described.MOUNT_FIX}")
        if mount["name"] not in volumes:
            reader.reject("volumeMounts", f"{mount['name']} is no volume of pod.volumes; add the volume")
    return mounts
