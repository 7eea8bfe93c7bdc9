"""Containers: image, command, environment, probes, resources, rights. Pure.

The rights are those of the Pod Security level ``restricted``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator.api import PodOptions
from kvtier_operator.resources.objects.quantities import bytes_text, canonical_resources

USER: Final = 65532
"""Id of the user and group that every container runs as, whatever its image says."""
SCRATCH_DIR: Final = "/tmp"  # noqa: S108 - a volume of the pod's own

_MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Probe:
    """A GET that answers 200.

    Attributes:
        path: with a leading slash; empty = a connection is enough.
        port: name of the container's port.
        period_s: between two.
        failures: in a row that count.
        timeout_s: for an answer.
    """

    path: str
    port: str
    period_s: int
    failures: int
    timeout_s: int = 3

    def render(self) -> dict[str, Any]:
        """As in a container."""
        how: dict[str, Any] = {"tcpSocket": {"port": self.port}}
        if self.path:
            how = {"httpGet": {"path": self.path, "port": self.port}}
        return how | {
            "periodSeconds": self.period_s,
            "failureThreshold": self.failures,
            "timeoutSeconds": self.timeout_s,
        }


@dataclass(frozen=True, slots=True)
class Probes:
    """When a container has started, must be restarted, and gets traffic.

    Until it has started the other two rest, so that a slow start is no reason to restart it.
    """

    startup: Probe
    liveness: Probe
    readiness: Probe

    def render(self) -> dict[str, Any]:
        """As in a container."""
        return {
            "startupProbe": self.startup.render(),
            "livenessProbe": self.liveness.render(),
            "readinessProbe": self.readiness.render(),
        }


@dataclass(frozen=True, slots=True)
class Before:
    """A program that runs, and ends, before the container starts. It has the container's environment and volumes."""

    name: str
    image: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """The only container of a pod.

    Attributes:
        image: with a tag or digest.
        pull_policy: of the image.
        command: as `slots.Command` renders it.
        env: by name; a mapping stands for ``valueFrom``.
        ports: by name.
        memory_bytes: that it needs, when the user says nothing about memory.
        pre_stop_s: to go on before it is told to stop, until nobody sends it requests any more.
        mounts: beyond the user's.
        before: what prepares its start.
    """

    name: str
    image: str
    pull_policy: str
    command: Mapping[str, Sequence[str]]
    ports: Mapping[str, int]
    probes: Probes
    env: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    memory_bytes: int = 0
    pre_stop_s: int = 0
    mounts: tuple[Mapping[str, Any], ...] = ()
    before: Before | None = None


def render_container(container: Container, options: PodOptions) -> dict[str, Any]:
    """As in a pod, with what the user adds."""
    rendered: dict[str, Any] = {
        "name": container.name,
        "image": container.image,
        "imagePullPolicy": container.pull_policy,
        **{key: list(words) for key, words in container.command.items()},
        "env": _environment(container, options),
        "ports": [{"name": name, "containerPort": port} for name, port in container.ports.items()],
        **container.probes.render(),
        "volumeMounts": _mounts(container, options),
        "securityContext": _rights(),
    }
    if container.pre_stop_s:
        rendered["lifecycle"] = {"preStop": {"sleep": {"seconds": container.pre_stop_s}}}
    if resources := _resources(container.memory_bytes, options):
        rendered["resources"] = resources
    return rendered


def render_before(container: Container, options: PodOptions) -> list[dict[str, Any]]:
    """``initContainers`` of the pod."""
    before = container.before
    if before is None:
        return []
    rendered: dict[str, Any] = {
        "name": before.name,
        "image": before.image,
        "imagePullPolicy": container.pull_policy,
        "command": list(before.command),
        "env": _environment(container, options),
        "volumeMounts": _mounts(container, options),
        "securityContext": _rights(),
    }
    return [rendered]


def pod_field(path: str) -> dict[str, Any]:
    """An environment variable's source: a field of the pod."""
    return {"fieldRef": {"fieldPath": path}}


def mount(volume: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    """A mount of one of the pod's volumes."""
    return {"name": volume, "mountPath": path} | ({"readOnly": True} if read_only else {})


def _environment(container: Container, options: PodOptions) -> list[dict[str, Any]]:
    return [_variable(name, value) for name, value in (dict(container.env) | dict(options.env)).items()]


def _mounts(container: Container, options: PodOptions) -> list[dict[str, Any]]:
    return [dict(mounted) for mounted in (*container.mounts, *options.volume_mounts)]


def _rights() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def _variable(name: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {"name": name, "valueFrom": dict(value)}
    return {"name": name, "value": value} if value else {"name": name}


def _resources(memory_bytes: int, options: PodOptions) -> dict[str, dict[str, str]]:
    """The user's, and a request for memory when he names none: the scheduler must know what a pod holds by design."""
    resources = canonical_resources(options.resources)
    if memory_bytes and not any(_MEMORY in amounts for amounts in resources.values()):
        resources["requests"] = resources.get("requests", {}) | {_MEMORY: bytes_text(memory_bytes)}
    return resources
