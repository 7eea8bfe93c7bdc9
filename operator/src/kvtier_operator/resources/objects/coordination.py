"""The managed etcd: its set, Service and disruption budget. Pure.

Its members are equal and guard themselves: one that is not ready keeps Kubernetes from replacing the next, so the set
rolls by itself, unlike masters and storage nodes, whose order only the operator knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import ManagedEtcd
from kvtier_operator.api.schema.pod import OWNED_VOLUME_PREFIX
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.ports import EtcdPort
from kvtier_operator.resources.etcd import QUOTA_BYTES, EtcdMember, etcd_flags
from kvtier_operator.resources.objects.containers import Before, Container, Probe, Probes, mount
from kvtier_operator.resources.objects.manifests import selector
from kvtier_operator.resources.objects.places import ANY_ADDRESS, Places
from kvtier_operator.resources.objects.pods import Pod
from kvtier_operator.resources.objects.quantities import bytes_text
from kvtier_operator.resources.objects.workloads import PodSet, budget, headless_service, stateful_set

_FOLDER: Final = "/var/lib/etcd"
_CONFIG: Final = f"{_FOLDER}/member.json"
_CLAIM, _VOLUME = "data", f"{OWNED_VOLUME_PREFIX}data"
_MEMORY_BYTES = 512 << 20
_GRACE_S = 10
_PROBES = Probes(
    startup=Probe("/livez", "client", period_s=2, failures=150),
    # A member of a quorum that is lost lives: restarting it would not bring the others back.
    liveness=Probe("/livez", "client", period_s=10, failures=6, timeout_s=5),
    readiness=Probe("/readyz", "client", period_s=3, failures=3),
)


def etcd_objects(places: Places, replicas: int) -> Iterator[tuple[Stage, Manifest]]:
    """Objects of the managed etcd; none if the manifest has no such, or nothing for it to do.

    Args:
        places: of the cluster.
        replicas: pods that run now; what the members know of one another follows the manifest instead.
    """
    cluster, managed = places.cluster, places.cluster.coordination.managed
    if managed is None or not cluster.uses_store:
        return
    name, selected = names.etcd_set(cluster.name), selector(cluster, Component.ETCD)
    block = places.group_block(Component.ETCD)
    ports = {"client": block.port(EtcdPort.CLIENT), "peer": block.port(EtcdPort.PEER)}
    yield (
        Stage.FOUNDATION,
        headless_service(cluster, name, selected, {port: (number, port) for port, number in ports.items()}),
    )
    if managed.replicas > 1:
        # A share or maxUnavailable would be taken of the pods that there are; a quorum is of those there should be.
        yield Stage.FOUNDATION, budget(cluster, name, selected, {"minAvailable": managed.quorum})
    container = Container(
        name="etcd",
        image=cluster.images.etcd,
        pull_policy=cluster.images.pull_policy,
        command={"command": ["etcd"], "args": [f"--config-file={_CONFIG}"]},
        ports=ports,
        probes=_PROBES,
        memory_bytes=_MEMORY_BYTES,
        mounts=(mount(_CLAIM if managed.storage_bytes else _VOLUME, _FOLDER),),
        before=Before("member", cluster.images.default, _preparation(places, managed)),
    )
    pod = Pod(
        container=container,
        options=managed.pod,
        selector=selected,
        alike=selected,
        grace_s=_GRACE_S,
        volumes=() if managed.storage_bytes else ({"name": _VOLUME, "emptyDir": {}},),
        host_network=cluster.transport.host_network,
    )
    claims = (_claim(managed),) if managed.storage_bytes else ()
    wanted = PodSet(name, name, replicas, pod, places.port_block(Component.ETCD), rolling=True, claims=claims)
    yield Stage.COORDINATION, stateful_set(cluster, wanted)


def _preparation(places: Places, managed: ManagedEtcd) -> tuple[str, ...]:
    """A member without data may be new or one that lost them; etcd itself gives up on the latter."""
    endpoints = ";".join(places.etcd_endpoints)
    own = ("kvtier", "etcd-member", f"--config={_CONFIG}", f"--endpoints={endpoints}", "--")
    return (*own, *_flags(places, managed))


def _flags(places: Places, managed: ManagedEtcd) -> tuple[str, ...]:
    """Flags that hold for every member: each puts in its own name."""
    name = names.etcd_set(places.cluster.name)
    members = places.etcd_members
    some = members[0]
    own = EtcdMember("$(POD_NAME)", places.host_of("$(POD_NAME)", name), some.client_port, some.peer_port)
    quota = min(QUOTA_BYTES, managed.storage_bytes * 4 // 5) if managed.storage_bytes else QUOTA_BYTES
    return etcd_flags(
        own,
        members,
        data_dir=f"{_FOLDER}/{_CLAIM}",
        token=places.cluster.effective_cluster_id,
        listen_host=ANY_ADDRESS,
        quota_bytes=quota,
    )


def _claim(managed: ManagedEtcd) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": bytes_text(managed.storage_bytes)}},
    }
    if managed.storage_class:
        spec["storageClassName"] = managed.storage_class
    return {"metadata": {"name": _CLAIM}, "spec": spec}
