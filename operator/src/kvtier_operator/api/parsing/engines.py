"""Roles and their cache tiers. Pure; called by `document`."""

from __future__ import annotations

from kvtier_operator.api.choices import Dialect, RoleType
from kvtier_operator.api.engine_settings import read_settings
from kvtier_operator.api.parsing.pods import read_pod
from kvtier_operator.api.reading import Reader
from kvtier_operator.api.records import Role, Tiers
from kvtier_operator.api.schema.engines import TAKEN_FIX
from kvtier_operator.api.schema.limits import TAKEN_ROLE_NAMES


def read_role(reader: Reader, dialect: Dialect) -> Role:
    """Engines that do the same work."""
    role = Role(
        name=reader.text("name"),
        type=reader.choice("type", RoleType),
        replicas=reader.integer("replicas"),
        tensor=reader.child("parallelism").integer("tensor"),
        port=reader.integer("port"),
        tiers=_tiers(reader.child("tiers")),
        settings=read_settings(reader, ours=dialect is Dialect.KVTIER),
        shm_bytes=reader.child("shm").bytes("size"),
        grace_ms=reader.child("termination").integer("graceSeconds") * 1000,
        pod=read_pod(reader),
    )
    if role.name in TAKEN_ROLE_NAMES or role.name.startswith("store-"):
        reader.reject("name", TAKEN_FIX)
    return role


def _tiers(reader: Reader) -> Tiers:
    device, host, store = reader.child("device"), reader.child("host"), reader.child("store")
    prefetch = store.child("prefetch")
    tiers = Tiers(
        device_bytes=device.bytes("size"),
        device_memory_fraction=device.decimal("memoryFraction"),
        host_blocks_factor=host.decimal("blocksFactor"),
        store_enabled=store.boolean("enabled"),
        prefetch_batch=prefetch.integer("batch"),
        prefetch_timeout_ms=prefetch.duration_ms("timeout"),
    )
    if device.has("size") and device.has("memoryFraction"):
        device.reject("memoryFraction", "write either size or memoryFraction")
    if not 0 < tiers.device_memory_fraction <= 1:
        device.reject("memoryFraction", "write a fraction above 0 and at most 1")
    if tiers.store_enabled and tiers.host_blocks_factor <= 1:
        host.reject("blocksFactor", "write more than 1: the store tier is reached through host memory")
    return tiers
