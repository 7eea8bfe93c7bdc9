"""What all objects of a cluster have in common: names, labels, owner, and the hash by which a changed intent is found.

Pure; called by every builder of this package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kvtier_operator import labels
from kvtier_operator.api import API_VERSION, KIND, KVCacheCluster
from kvtier_operator.kinds import KINDS
from kvtier_operator.observed import Component, Manifest

_HASH_LENGTH = 16


def manifest(
    cluster: KVCacheCluster,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    *,
    own: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """One object of the cluster.

    Args:
        cluster: its owner.
        kind: one of `kinds.KINDS`.
        name: one of `names`.
        body: everything but ``apiVersion``, ``kind`` and ``metadata``.
        own: labels beyond those of every child.
        annotations: beyond the hash.
    """
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": cluster.metadata.namespace,
        "labels": child_labels(cluster) | dict(own or {}),
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    if cluster.metadata.uid:  # a file has none: then nothing is applied, only shown
        metadata["ownerReferences"] = [owner_reference(cluster)]
    return {"apiVersion": KINDS[kind].api, "kind": kind, "metadata": metadata, **body}


def child_labels(cluster: KVCacheCluster) -> dict[str, str]:
    """Labels of every child and pod."""
    return {
        labels.NAME: "kvtier",
        labels.INSTANCE: cluster.name,
        labels.PART_OF: "kvtier",
        labels.MANAGED_BY: labels.MANAGER,
        labels.CLUSTER: cluster.name,
    }


def selector(
    cluster: KVCacheCluster, component: Component, *, pool: str = "", role: str = "", revision: str = ""
) -> dict[str, str]:
    """Labels that select the pods of a component, or of one pool, role or revision of it."""
    chosen = {labels.POOL: pool, labels.ROLE: role, labels.REVISION: revision}
    return {
        labels.CLUSTER: cluster.name,
        labels.COMPONENT: str(component),
        **{name: value for name, value in chosen.items() if value},
    }


def stamp(intent: Manifest) -> Manifest:
    """The manifest with its own hash as annotation: the same intent always has the same one."""
    metadata = dict(intent["metadata"])
    annotations = {name: text for name, text in metadata.get("annotations", {}).items() if name != labels.APPLIED_HASH}
    bare = intent | {"metadata": metadata | {"annotations": annotations}}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
    return intent | {"metadata": metadata | {"annotations": annotations | {labels.APPLIED_HASH: digest}}}


def owner_reference(cluster: KVCacheCluster) -> dict[str, Any]:
    """By which the garbage collector takes an object along with its cluster."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cluster.name,
        "uid": cluster.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
