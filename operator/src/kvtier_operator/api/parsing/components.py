"""Coordination, masters, store and router. Pure; called by `document`."""

from __future__ import annotations

from kvtier_operator.api.choices import DrainMode, DrainTimeout, Durability, StoreKind
from kvtier_operator.api.parsing.pods import read_pod
from kvtier_operator.api.reading import Reader
from kvtier_operator.api.records import Coordination, Drain, ManagedEtcd, Master, Router, StorePool
from kvtier_operator.api.schema.limits import LAST_PORT


def read_coordination(reader: Reader) -> Coordination:
    """Which etcd elects the leader."""
    if not reader.has("etcd"):
        reader.values("etcd")
        return Coordination()
    etcd = reader.child("etcd")
    external, managed = etcd.child("external"), etcd.child("managed")
    if etcd.has("external") == etcd.has("managed"):
        reader.reject("etcd", "write either external or managed")
    return Coordination(
        external=_endpoints(external) if etcd.has("external") else (),
        managed=_managed(managed) if etcd.has("managed") else None,
    )


def read_master(reader: Reader, *, uses_etcd: bool) -> Master:
    """The masters; what survives a failover depends on the etcd."""
    master = Master(
        replicas=reader.integer("replicas"),
        lease_ttl_ms=reader.duration_ms("leaseTTL"),
        client_ttl_ms=reader.duration_ms("clientTTL"),
        durability=_durability(reader, uses_etcd=uses_etcd),
        pod=read_pod(reader),
    )
    if master.client_ttl_ms % 1000:
        reader.reject("clientTTL", "write whole seconds")
    return master


def read_pools(reader: Reader) -> tuple[StorePool, ...]:
    """Pools of storage nodes."""
    return tuple(_pool(pool) for pool in reader.children("pools"))


def read_router(reader: Reader) -> Router:
    """The router of a cluster with split roles."""
    return Router(replicas=reader.integer("replicas"), port=reader.integer("port"), pod=read_pod(reader))


def _endpoints(reader: Reader) -> tuple[str, ...]:
    endpoints = reader.texts("endpoints")
    for endpoint in endpoints:
        port = endpoint.rpartition(":")[2]
        if port.isdecimal() and not 0 < int(port) <= LAST_PORT:
            reader.reject("endpoints", f"{endpoint} has no port from 1 to {LAST_PORT}")
    return endpoints


def _managed(reader: Reader) -> ManagedEtcd:
    storage = reader.child("storage")
    if reader.has("storage") and not storage.has("size"):
        storage.reject("size", 'write the size of each volume, as in "10Gi", or remove storage')
    return ManagedEtcd(
        replicas=reader.integer("replicas"),
        storage_bytes=storage.bytes("size"),
        storage_class=storage.text("class"),
        pod=read_pod(reader),
    )


def _durability(reader: Reader, *, uses_etcd: bool) -> Durability:
    if not reader.has("durability"):
        return Durability.OPLOG if uses_etcd else Durability.NONE
    return reader.choice("durability", Durability)


def _pool(reader: Reader) -> StorePool:
    drain = reader.child("drain")
    if not reader.has("segmentSize"):
        reader.reject("segmentSize", 'write the memory that each node gives, as in "4Gi"')
    return StorePool(
        name=reader.text("name"),
        kind=reader.choice("kind", StoreKind),
        replicas=reader.integer("replicas"),
        segment_bytes=reader.bytes("segmentSize"),
        drain=Drain(
            mode=drain.choice("mode", DrainMode),
            timeout_ms=drain.duration_ms("timeout"),
            on_timeout=drain.choice("onTimeout", DrainTimeout),
        ),
        pod=read_pod(reader),
    )
