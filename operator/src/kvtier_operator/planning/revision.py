"""Which revision of the engines a manifest asks for, and the model id that its store keys carry. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvtier_operator.api import KVCacheCluster, Model, NamespacePolicy, Role
from kvtier_operator.api.schema.limits import REVISION_LENGTH

_IDENTITY_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of all engine roles together, so that prefill and decode always belong together.

    Attributes:
        name: short hash of everything that makes an engine's pod what it is, replicas apart.
        lane: ``A`` or ``B``; two revisions that exist at the same time have different ones.
    """

    name: str
    lane: str


def revision_of(cluster: KVCacheCluster) -> str:
    """Name of the revision that the manifest asks for: 8 hex digits.

    It follows whatever a running engine cannot take over: its image, model, settings, addresses. Replicas, rollout,
    observability, the range of ports and the other components' pods leave it alone, and so does the operator's own
    version.
    """
    images, etcd, transport = cluster.images, cluster.coordination, cluster.transport
    return _digest(
        {
            "image": [images.engine or images.default, images.pull_policy, *images.pull_secrets],
            "dialect": cluster.dialect,
            "clusterID": cluster.effective_cluster_id,
            "model": [effective_model_id(cluster.model), cluster.model.uri],
            "roles": sorted((_engine_of(role) for role in cluster.roles), key=lambda role: str(role["name"])),
            # Not the range of ports: every slot keeps the block that it has.
            "transport": [transport.protocol, transport.host_network, transport.shared_memory],
            # The address of the masters: etcd's members, or the only master itself.
            "etcd": [*etcd.external, etcd.managed.replicas if etcd.managed else 0],
        },
        REVISION_LENGTH,
    )


def effective_model_id(model: Model) -> str:
    """Namespace of the model's store keys and its name in the API.

    Keys do not contain weights, so two models that differ in them must never share an id: as soon as the manifest says
    more than the id, a short hash of it is added. Under the policy Explicit the id stands as it is.
    """
    identity = [model.revision, model.weights_digest, model.quantization]
    if model.namespace_policy is NamespacePolicy.EXPLICIT or not any(identity):
        return model.id
    return f"{model.id}@{_digest(identity, _IDENTITY_LENGTH)}"


def _engine_of(role: Role) -> Mapping[str, Any]:
    return {name: value for name, value in asdict(role).items() if name != "replicas"}


def _digest(content: Any, length: int) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
