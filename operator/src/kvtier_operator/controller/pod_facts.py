"""What the operator keeps of a pod: the few facts that plans and status ask for. Pure; made from each watch event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.units import seconds_of
from kvtier_operator.labels import (
    COMPONENT,
    DRAIN_JOB,
    DRAIN_SINCE,
    LEADER,
    MASTER_ROLE,
    POD_INDEX,
    POOL,
    REVISION,
    ROLE,
)
from kvtier_operator.observed import Component, ObservedPod

_HOPELESS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
"""Reasons for which a container waits and that time alone does not mend."""
_TEMPLATE_HASHES = ("controller-revision-hash", "pod-template-hash")
_LONGEST_TEXT = 300


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod. What is not said here is as in `ObservedPod`.

    Attributes:
        template: hash of the template that it was made from, by its workload's controller.
        owner: name of the workload; of a Deployment's pod, of the ReplicaSet.
        since: when it was made, seconds since the epoch; for how long it waits.
        drain_job: the annotation of a drain that was asked for; empty = none.
        drain_since: seconds since the epoch.
    """

    component: Component
    group: str
    slot: int
    revision: str
    template: str
    owner: str
    ready: bool
    deleting: bool
    failure: str
    waiting: str
    since: float
    ip: str
    leader: bool
    drain_job: str
    drain_since: float

    def observed(self, name: str, uid: str, newest: str | None, now: float) -> ObservedPod:
        """As plans see it.

        Args:
            name: of the pod.
            uid: of the pod.
            newest: hash of the workload's newest template; None = the workload is unknown, then nothing is old.
            now: seconds since the epoch.
        """
        return ObservedPod(
            name=name,
            uid=uid,
            component=self.component,
            group=self.group,
            slot=self.slot,
            revision=self.revision or self.template,
            up_to_date=not newest or not self.template or newest == self.template,
            ready=self.ready,
            deleting=self.deleting,
            failure=self.failure,
            waiting=self.waiting,
            waiting_s=max(0.0, now - self.since) if self.waiting else 0.0,
            ip=self.ip,
            leader=self.leader,
        )


def pod_facts(body: Mapping[str, Any]) -> PodFacts | None:
    """Facts of a pod as the API server shows it; None if it is none of a cluster's components."""
    meta, status = body["metadata"], body.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    try:
        component = Component(labels.get(COMPONENT, ""))
    except ValueError:
        return None
    deleting = bool(meta.get("deletionTimestamp"))
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    ready = _is_true(conditions, "Ready") and not deleting
    owner = next((item["name"] for item in meta.get("ownerReferences") or () if item.get("controller")), "")
    return PodFacts(
        component=component,
        group=labels.get(ROLE) or labels.get(POOL) or "",
        slot=_slot(meta["name"], labels),
        revision=labels.get(REVISION, ""),
        template=next((labels[name] for name in _TEMPLATE_HASHES if name in labels), ""),
        owner=owner,
        ready=ready,
        deleting=deleting,
        failure="" if ready else _failure(status),
        waiting="" if ready or deleting else _waiting(status, conditions),
        since=seconds_of(meta.get("creationTimestamp", "")),
        ip=status.get("podIP", ""),
        leader=labels.get(MASTER_ROLE) == LEADER,
        drain_job=annotations.get(DRAIN_JOB, ""),
        drain_since=seconds_of(annotations.get(DRAIN_SINCE, "")),
    )


def _is_true(conditions: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    return conditions.get(name, {}).get("status") == "True"


def _slot(name: str, labels: Mapping[str, str]) -> int:
    ordinal = labels.get(POD_INDEX) or name.rpartition("-")[2]
    return int(ordinal) if ordinal.isdecimal() else 0


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _failure(status: Mapping[str, Any]) -> str:
    if status.get("phase") == "Failed":
        return _words(status.get("reason") or "Failed", status.get("message"))
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            ended = container.get("lastState", {}).get("terminated") or {}
            return _words(waiting["reason"], ended.get("message") or waiting.get("message"))
    return ""


def _waiting(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _words(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting:
            return _words(waiting.get("reason") or "Waiting", waiting.get("message"))
    unready = conditions.get("Ready", {})
    if unready.get("status") == "False":
        return _words(unready.get("reason") or "NotReady", unready.get("message"))
    return "Pending"


def _words(reason: str, message: str | None) -> str:
    text = " ".join((message or "").split())[-_LONGEST_TEXT:]
    return f"{reason}: {text}" if text else reason
