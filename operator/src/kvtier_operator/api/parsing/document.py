"""A whole document: metadata, spec, and what fits no smaller part. Pure; called by `api`."""

from __future__ import annotations

import re
from typing import Any

from kvtier_operator.api import cross_rules
from kvtier_operator.api.choices import Dialect, NamespacePolicy, Protocol
from kvtier_operator.api.parsing.components import read_coordination, read_master, read_pools, read_router
from kvtier_operator.api.parsing.engines import read_role
from kvtier_operator.api.parsing.policies import (
    read_deletion,
    read_images,
    read_network_policies,
    read_observability,
    read_rollout,
)
from kvtier_operator.api.reading import Reader
from kvtier_operator.api.records import (
    API_VERSION,
    KIND,
    PACKAGED_MODEL_URI,
    KVCacheCluster,
    Metadata,
    Model,
    PortRange,
    Transport,
)
from kvtier_operator.api.schema.limits import LAST_PORT
from kvtier_operator.api.schema.spec import CLAIM_PATTERN, DOCUMENT, METADATA, SPEC, URI_FIX
from kvtier_operator.errors import SpecError, Violation


def parse(document: Any) -> KVCacheCluster:
    """Turn a manifest, as read from YAML or from the API server, into records.

    Raises:
        SpecError: with every violation.
    """
    violations: list[Violation] = []
    root = Reader(document, "", DOCUMENT, violations)
    _check_kind(root)
    root.values("status")
    metadata = Reader(root.values("metadata"), "metadata", METADATA, violations, extra=True)
    name = metadata.text("name")
    cluster = _cluster(name, _metadata(metadata), Reader(root.values("spec"), "spec", SPEC, violations))
    violations += cross_rules.violations(cluster)
    if violations:
        raise SpecError(violations)
    return cluster


def _cluster(name: str, metadata: Metadata, spec: Reader) -> KVCacheCluster:
    coordination = read_coordination(spec.child("coordination"))
    dialect = spec.child("engine").choice("dialect", Dialect)
    return KVCacheCluster(
        name=name,
        metadata=metadata,
        paused=spec.boolean("paused"),
        cluster_id=spec.text("clusterID"),
        dialect=dialect,
        images=read_images(spec.child("images")),
        coordination=coordination,
        master=read_master(spec.child("master"), uses_etcd=coordination.uses_etcd),
        pools=read_pools(spec.child("store")),
        transport=_transport(spec.child("transport")),
        model=_model(spec.child("model")),
        roles=tuple(read_role(role, dialect) for role in spec.children("roles")),
        router=read_router(spec.child("router")) if spec.has("router") else None,
        rollout=read_rollout(spec.child("rollout")),
        network_policies=read_network_policies(spec.child("security")),
        observability=read_observability(spec.child("observability")),
        deletion=read_deletion(spec.child("deletion")),
    )


def _check_kind(root: Reader) -> None:
    if root.text("apiVersion") != API_VERSION:
        root.reject("apiVersion", f"write {API_VERSION}")
    if root.text("kind") != KIND:
        root.reject("kind", f"write {KIND}")


def _metadata(reader: Reader) -> Metadata:
    """What only the API server writes is taken as it stands."""
    finalizers = reader.stated("finalizers")
    return Metadata(
        namespace=reader.text("namespace"),
        uid=reader.text("uid"),
        generation=reader.integer("generation"),
        deleting=reader.stated("deletionTimestamp") is not None,
        finalizers=tuple(map(str, finalizers)) if isinstance(finalizers, list) else (),
        annotations={str(key): str(value) for key, value in reader.values("annotations").items()},
    )


def _transport(reader: Reader) -> Transport:
    span = reader.child("ports").child("range")
    ports = PortRange(start=span.integer("start"), size=span.integer("size"))
    if ports.stop > LAST_PORT + 1:
        span.reject("size", f"start + size must not pass {LAST_PORT + 1}")
    return Transport(
        protocol=reader.choice("protocol", Protocol),
        shared_memory=reader.boolean("sharedMemory"),
        host_network=reader.boolean("hostNetwork"),
        ports=ports,
    )


def _model(reader: Reader) -> Model:
    source, identity = reader.child("source"), reader.child("identity")
    uri = source.text("uri")
    if "://" in uri and not (uri.startswith("file:///") or uri == PACKAGED_MODEL_URI or _is_claim(uri)):
        source.reject("uri", URI_FIX)
    return Model(
        uri=uri,
        id=identity.text("id"),
        revision=identity.text("revision"),
        weights_digest=identity.text("weightsDigest"),
        quantization=identity.text("quantization"),
        namespace_policy=reader.choice("namespacePolicy", NamespacePolicy),
    )


def _is_claim(uri: str) -> bool:
    return re.fullmatch(CLAIM_PATTERN, uri) is not None and ".." not in uri.split("/")
