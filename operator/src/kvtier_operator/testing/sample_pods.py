"""Pods, workloads and masters as observed, with defaults: what tests of single decisions start from. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier_operator import labels, names
from kvtier_operator.observed import (
    Component,
    MasterRole,
    MasterState,
    ObjectRef,
    Observed,
    ObservedObject,
    ObservedPod,
)
from kvtier_operator.testing.sample_clusters import UID


def sample_pod(component: Component, slot: int, group: str = "", revision: str = "", **changes: Any) -> ObservedPod:
    """A pod that is ready, unless the changes say otherwise."""
    middle = {Component.STORE: f"store-{group}", Component.ENGINE: f"{group}-{revision}"}.get(component, str(component))
    fields: dict[str, Any] = {
        "name": f"kv-{middle}-{slot}",
        "uid": f"uid-{middle}-{slot}",
        "component": component,
        "group": group,
        "slot": slot,
        "revision": revision,
        "ready": not (changes.get("deleting") or changes.get("failure")),
        "ip": "127.0.0.9",
    }
    return ObservedPod(**(fields | changes))


def master_pods(count: int = 3, **changes: Any) -> list[ObservedPod]:
    """Masters, all alike."""
    return [sample_pod(Component.MASTER, slot, **changes) for slot in range(count)]


def store_pods(count: int = 2, pool: str = "dram", **changes: Any) -> list[ObservedPod]:
    """Storage nodes of a pool, all alike."""
    return [sample_pod(Component.STORE, slot, pool, **changes) for slot in range(count)]


def engine_pods(count: int, revision: str, role: str = "engine", **changes: Any) -> list[ObservedPod]:
    """Engines of a role in a revision, all alike."""
    return [sample_pod(Component.ENGINE, slot, role, revision, **changes) for slot in range(count)]


def elected(count: int = 3, leader: int = 0, *, caught_up: bool = True) -> dict[str, MasterState]:
    """What masters say after an election."""
    states = {}
    for slot in range(count):
        name, leads = f"kv-master-{slot}", slot == leader
        role = MasterRole.LEADER if leads else MasterRole.STANDBY
        states[name] = MasterState(name, role, serving=leads, view_version=1, caught_up=caught_up and not leads)
    return states


def workload(
    component: Component, replicas: int, group: str = "", revision: str = "", lane: str = "", **changes: Any
) -> ObservedObject:
    """A StatefulSet of the sample cluster."""
    name = {
        Component.ETCD: names.etcd_set("kv"),
        Component.MASTER: names.master_set("kv"),
        Component.STORE: names.store_set("kv", group),
        Component.ENGINE: names.engine_set("kv", group, revision),
        Component.ROUTER: names.router_deployment("kv"),
    }[component]
    own = {labels.COMPONENT: str(component), labels.CLUSTER: "kv"}
    if group:
        own[labels.ROLE if component is Component.ENGINE else labels.POOL] = group
    if revision:
        own |= {labels.REVISION: revision, labels.LANE: lane}
    kind = "Deployment" if component is Component.ROUTER else "StatefulSet"
    fields: dict[str, Any] = {
        "ref": ObjectRef(kind, name),
        "uid": f"uid-{name}",
        "owner_uid": UID,
        "applied_hash": "",
        "replicas": replicas,
        "labels": own,
    }
    return ObservedObject(**(fields | changes))


def seen(objects: Iterable[ObservedObject] = (), pods: Iterable[ObservedPod] = (), **more: Any) -> Observed:
    """An observation."""
    return Observed(objects={item.ref: item for item in objects}, pods=tuple(pods), **more)
