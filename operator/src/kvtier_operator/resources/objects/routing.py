"""The router of a cluster with split roles: `xllm_master_serving` as a Deployment. Pure.

It starts together with the engines, not after them: an engine is ready when it has registered at a router, and a
router when engines have registered. It has addresses of its own also where engines are on the host network.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_worker.contract import WorkerSettings

from kvtier_operator import names
from kvtier_operator.api import Router
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.resources.objects.containers import Container, Probe, Probes
from kvtier_operator.resources.objects.dialects import router_flags
from kvtier_operator.resources.objects.engines import PRE_STOP_S
from kvtier_operator.resources.objects.manifests import manifest, selector
from kvtier_operator.resources.objects.models import model_place
from kvtier_operator.resources.objects.places import Places
from kvtier_operator.resources.objects.pods import Pod, pod_template
from kvtier_operator.resources.objects.workloads import budget, service

_MEMORY_BYTES = 512 << 20
_GRACE_S = 30
_PROBES = Probes(
    startup=Probe("", "rpc", period_s=2, failures=150),
    liveness=Probe("", "rpc", period_s=10, failures=6),
    # Its HTTP port is open while it knows engines that can answer.
    readiness=Probe("", "http", period_s=3, failures=2),
)


def router_objects(places: Places, replicas: int) -> Iterator[tuple[Stage, Manifest]]:
    """Objects of the router; none if the manifest has none.

    Args:
        places: of the cluster.
        replicas: pods that run now.
    """
    cluster, router = places.cluster, places.cluster.router
    if router is None:
        return
    name, selected = names.router_deployment(cluster.name), selector(cluster, Component.ROUTER)
    ports = {"http": router.port, "rpc": places.group_block(Component.ROUTER).port(0)}
    numbers = {port: (number, port) for port, number in ports.items()}
    yield Stage.FOUNDATION, service(cluster, name, selected, numbers, selected)
    if router.replicas > 1:
        yield Stage.FOUNDATION, budget(cluster, name, selected, {"maxUnavailable": 1})
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": selected},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": pod_template(cluster, _pod(places, router, ports)),
    }
    yield (
        Stage.ENGINES,
        manifest(
            cluster, "Deployment", name, {"spec": spec}, own=selected, annotations=places.port_block(Component.ROUTER)
        ),
    )


def _pod(places: Places, router: Router, ports: dict[str, int]) -> Pod:
    cluster, selected = places.cluster, selector(places.cluster, Component.ROUTER)
    model = model_place(cluster.model.uri)
    flags = [
        "--server_host=$(POD_IP)",
        f"--http_server_port={ports['http']}",
        f"--rpc_server_port={ports['rpc']}",
        *router_flags(places),
        f"--tokenizer_path={model.path}",
        *_hashing_flags(places),
    ]
    container = Container(
        name="router",
        image=cluster.images.router or cluster.images.engine or cluster.images.default,
        pull_policy=cluster.images.pull_policy,
        command={"command": ["xllm_master_serving"], "args": flags},
        ports=ports,
        probes=_PROBES,
        env={"ENABLE_DECODE_RESPONSE_TO_SERVICE": "true"},
        memory_bytes=_MEMORY_BYTES,
        pre_stop_s=PRE_STOP_S,
        mounts=model.mounts,
    )
    return Pod(container, router.pod, selected, alike=selected, grace_s=_GRACE_S, volumes=model.volumes)


def _hashing_flags(places: Places) -> list[str]:
    """The router looks prompts up by the engines' block hashes, so both must make the same."""
    settings, defaults = places.cluster.roles[0].settings, WorkerSettings()
    names_of = ("block_size", "xxh3_128bits_seed")
    return [f"--{name}={settings.get(name, getattr(defaults, name))}" for name in names_of]
