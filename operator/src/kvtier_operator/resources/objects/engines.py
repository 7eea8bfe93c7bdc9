"""The engines: a set and a ConfigMap per role and revision, a Service and a budget per role, the API Service. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier_operator import labels, names
from kvtier_operator.api import Dialect, Role
from kvtier_operator.api.schema.pod import OWNED_VOLUME_PREFIX
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import EngineSet, Stage
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.resources.engine import STOP_MARGIN_S
from kvtier_operator.resources.objects.containers import Container, Probe, Probes, mount
from kvtier_operator.resources.objects.dialects import EngineLine
from kvtier_operator.resources.objects.manifests import selector
from kvtier_operator.resources.objects.models import ModelPlace, model_place
from kvtier_operator.resources.objects.places import Places
from kvtier_operator.resources.objects.pods import Pod
from kvtier_operator.resources.objects.quantities import bytes_text
from kvtier_operator.resources.objects.slots import Slot
from kvtier_operator.resources.objects.workloads import (
    PodSet,
    budget,
    headless_service,
    service,
    slot_config,
    stateful_set,
)

API_PORT = 80
"""Of the Service; engines and router listen on the ports that the manifest names."""
METRICS_PORT, XLLM_METRICS_PORT = "metrics", "brpc-metrics"
"""Names of a Service's port behind which metrics are, by path."""

PRE_STOP_S = 3
"""Until every proxy has heard that a pod takes no more requests."""

_SHM = f"{OWNED_VOLUME_PREFIX}shm"
_HEADROOM_BYTES = 2 << 30
"""Memory of an engine beyond its host tier and /dev/shm. Nobody knows the size of weights from a manifest: who serves
a large model from the CPU writes a request."""


def engine_objects(places: Places, sets: Sequence[EngineSet]) -> Iterator[tuple[Stage, Manifest]]:
    """Objects of all roles.

    Args:
        places: of the cluster.
        sets: of the newest revision, with the pods that run now.
    """
    cluster = places.cluster
    yield Stage.FOUNDATION, _api(places)
    for role in cluster.roles:
        name, selected = (
            names.engine_service(cluster.name, role.name),
            selector(cluster, Component.ENGINE, role=role.name),
        )
        metrics = METRICS_PORT if cluster.dialect is Dialect.KVTIER else XLLM_METRICS_PORT
        yield Stage.FOUNDATION, headless_service(cluster, name, selected, {metrics: (role.port, "http")})
        if role.replicas > 1:
            yield Stage.FOUNDATION, budget(cluster, name, selected, {"maxUnavailable": 1})
    roles = {role.name: role for role in cluster.roles}
    for engines in sets:
        yield from _SetBuilder(places, roles[engines.role], engines).objects()


def _api(places: Places) -> Manifest:
    """One address for requests: of the router, or of every fused engine, since each can answer."""
    cluster = places.cluster
    component = Component.ROUTER if cluster.router else Component.ENGINE
    selected = selector(cluster, component)
    return service(cluster, names.api_service(cluster.name), selected, {"http": (API_PORT, "http")}, selected)


@dataclass(frozen=True, slots=True)
class _SetBuilder:
    places: Places
    role: Role
    engines: EngineSet

    @property
    def _name(self) -> str:
        return names.engine_set(self.places.cluster.name, self.role.name, self.engines.revision.name)

    @property
    def _service(self) -> str:
        return names.engine_service(self.places.cluster.name, self.role.name)

    @property
    def _model(self) -> ModelPlace:
        return model_place(self.places.cluster.model.uri)

    @property
    def _line(self) -> EngineLine:
        return EngineLine(self.places, self.role, self._model.path)

    def objects(self) -> Iterator[tuple[Stage, Manifest]]:
        cluster, replicas = self.places.cluster, self.engines.replicas
        known = self.places.slot_blocks(Component.ENGINE, self.role.name, self.engines.revision.lane)
        assert set(range(replicas)) <= set(known), f"{self._name} has too few port blocks for {replicas} pods"
        lane = self.engines.revision.lane
        ports = self.places.port_block(Component.ENGINE, self.role.name, lane)
        wanted = PodSet(self._name, self._service, replicas, self._pod(), ports, labels={labels.LANE: lane})
        # Slots ahead of the pods: a new pod must find its files, and those of a volume come late.
        yield Stage.FOUNDATION, slot_config(cluster, wanted, (self._slot(*item) for item in known.items()))
        yield Stage.ENGINES, stateful_set(cluster, wanted)

    def _slot(self, slot: int, block: PortBlock) -> Slot:
        return self._line.slot(slot, self.places.host(self._name, slot, self._service), block)

    def _pod(self) -> Pod:
        cluster, role, model = self.places.cluster, self.role, self._model
        revision = self.engines.revision
        selected = selector(cluster, Component.ENGINE, role=role.name)
        drain_s = -(-self._line.drain_ms // 1000)
        container = Container(
            name="engine",
            image=cluster.images.engine or cluster.images.default,
            pull_policy=cluster.images.pull_policy,
            command=self._line.command.render(),
            ports={"http": role.port},
            probes=_probes("/ready" if cluster.dialect is Dialect.KVTIER else "/health"),
            env=self._line.env,
            memory_bytes=_memory_bytes(role),
            pre_stop_s=PRE_STOP_S,
            mounts=(mount(_SHM, "/dev/shm"), *model.mounts),  # noqa: S108 - a volume of the pod's own
        )
        return Pod(
            container=container,
            options=role.pod,
            selector=selected | {labels.REVISION: revision.name},
            alike=selected,
            grace_s=-(-role.grace_ms // 1000) or drain_s + PRE_STOP_S + STOP_MARGIN_S,
            labels={labels.LANE: revision.lane},
            config=self._name,
            volumes=(_shm_volume(role), *model.volumes),
            host_network=cluster.transport.host_network,
        )


def _shm_volume(role: Role) -> dict[str, object]:
    """What Docker calls --shm-size: 64 MiB otherwise, too small for collectives between ranks."""
    return {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": bytes_text(role.shm_bytes)}}


def _memory_bytes(role: Role) -> int:
    """What the volume in memory and the host tier may take, as far as the manifest tells."""
    return role.shm_bytes + role.tiers.host_bytes * role.tensor + _HEADROOM_BYTES


def _probes(ready: str) -> Probes:
    return Probes(
        # Weights of hundreds of gigabytes come from slow disks: an hour.
        startup=Probe("/health", "http", period_s=5, failures=720),
        liveness=Probe("/health", "http", period_s=10, failures=6, timeout_s=5),
        readiness=Probe(ready, "http", period_s=3, failures=2),
    )
