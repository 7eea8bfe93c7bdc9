"""What a kubelet would report about a pod whose containers do what a test wants. Pure; used by `hollow_nodes`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

Json = dict[str, Any]

_NEVER_STARTED = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError"})
"""Reasons of waiting with which a pod stays Pending; with the others its containers ran before."""


class Mood(StrEnum):
    """What the containers of a pod do."""

    READY = "ready"
    HELD = "held"
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a test wants of pods.

    Attributes:
        glob: matched with ``NAME`` and ``NAMESPACE/NAME`` of a pod.
        mood: of its containers.
        reason: why failing containers wait, as in CrashLoopBackOff.
    """

    glob: str
    mood: Mood
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of a pod and of its node."""

    pod_ip: str
    host_ip: str


def rule_of(pod: Mapping[str, Any], rules: Iterable[Rule]) -> Rule:
    """The last rule that matches; pods are ready without one."""
    metadata = pod["metadata"]
    names = (metadata["name"], f"{metadata['namespace']}/{metadata['name']}")
    matching = [rule for rule in rules if any(fnmatchcase(name, rule.glob) for name in names)]
    return matching[-1] if matching else Rule("*", Mood.READY)


def report(pod: Mapping[str, Any], rule: Rule, place: Place, now: str) -> Json:
    """What has to change in the pod's status, as a strategic merge patch of it; empty when nothing has.

    Args:
        pod: as the API server has it.
        rule: what its containers do.
        place: where it is.
        now: RFC 3339, for what changes now.
    """
    spec, status = pod["spec"], pod.get("status", {})
    wanted = {
        "phase": "Pending" if rule.reason in _NEVER_STARTED else "Running",
        "hostIP": place.host_ip,
        "hostIPs": [{"ip": place.host_ip}],
        "podIP": place.pod_ip,
        "podIPs": [{"ip": place.pod_ip}],
        "startTime": status.get("startTime", now),
        "containerStatuses": _containers(spec["containers"], status.get("containerStatuses", ()), rule, now),
    }
    if spec.get("initContainers"):
        known = status.get("initContainerStatuses", ())
        wanted["initContainerStatuses"] = _init_containers(spec["initContainers"], known, now)
    changes = {name: value for name, value in wanted.items() if not _within(value, status.get(name))}
    conditions = _conditions(spec, status, rule, now)
    return changes | ({"conditions": conditions} if conditions else {})


def _conditions(spec: Mapping[str, Any], status: Mapping[str, Any], rule: Rule, now: str) -> list[Json]:
    """Those that differ from what the pod has."""
    known = {condition["type"]: condition for condition in status.get("conditions", ())}
    gates = [gate["conditionType"] for gate in spec.get("readinessGates", ())]
    shut = [gate for gate in gates if known.get(gate, {}).get("status") != "True"]
    containers = "" if rule.mood is Mood.READY else "ContainersNotReady"
    reasons = {
        "PodReadyToStartContainers": "",
        "Initialized": "",
        "ContainersReady": containers,
        "Ready": containers or ("ReadinessGatesNotReady" if shut else ""),
    }
    changed = []
    for kind, reason in reasons.items():
        value = "False" if reason else "True"
        before = known.get(kind, {})
        if (before.get("status"), before.get("reason", "")) != (value, reason):
            flipped = before.get("status") != value
            since = now if flipped else before.get("lastTransitionTime", now)
            # None removes a reason that is over.
            changed.append({"type": kind, "status": value, "reason": reason or None, "lastTransitionTime": since})
    return changed


def _containers(containers: Iterable[Json], known: Iterable[Json], rule: Rule, now: str) -> list[Json]:
    before = {status["name"]: status for status in known}
    make = _waiting if rule.mood is Mood.FAILING else _running
    return [make(container, before.get(container["name"], {}), rule, now) for container in containers]


def _running(container: Json, before: Json, rule: Rule, now: str) -> Json:
    started = before.get("state", {}).get("running", {}).get("startedAt", now)
    return _status(container, before, {"running": {"startedAt": started}}) | {"ready": rule.mood is Mood.READY}


def _waiting(container: Json, before: Json, rule: Rule, now: str) -> Json:
    message = f"{container['name']} does not run: a test wants it so"
    status = _status(container, before, {"waiting": {"reason": rule.reason, "message": message}})
    status |= {"ready": False, "started": False}
    if rule.reason in _NEVER_STARTED:
        return status
    ended = before.get("lastState", {}).get("terminated") or {
        "exitCode": 1,
        "reason": "Error",
        "startedAt": now,
        "finishedAt": now,
    }
    return status | {"lastState": {"terminated": ended}, "restartCount": max(1, status["restartCount"])}


def _init_containers(containers: Iterable[Json], known: Iterable[Json], now: str) -> list[Json]:
    """Sidecars run on, the others are done."""
    before = {status["name"]: status for status in known}
    statuses = []
    for container in containers:
        past = before.get(container["name"], {})
        if container.get("restartPolicy") == "Always":
            statuses.append(_running(container, past, Rule("*", Mood.READY), now))
            continue
        ended = past.get("state", {}).get("terminated", {}).get("finishedAt", now)
        done = {"exitCode": 0, "reason": "Completed", "startedAt": ended, "finishedAt": ended}
        statuses.append(_status(container, past, {"terminated": done}) | {"ready": True, "started": False})
    return statuses


def _status(container: Json, before: Json, state: Json) -> Json:
    image = container.get("image", "")
    return {
        "name": container["name"],
        "image": image,
        "imageID": f"hollow://{image}",
        "containerID": f"hollow://{container['name']}",
        "started": True,
        "restartCount": before.get("restartCount", 0),
        "lastState": before.get("lastState", {}),
        "state": state,
    }


def _within(wanted: Any, found: Any) -> bool:
    """Whether everything wanted is there; servers add fields of their own."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return False
        return all(_within(value, found.get(key)) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(wanted) == len(found)
            and all(_within(one, other) for one, other in zip(wanted, found, strict=True))
        )
    return bool(wanted == found)
