"""The Mooncake masters: their set, Services, budget and slots. Pure.

Every probe goes to the admin port: a standby listens on no other, and would be restarted for being one.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_operator import labels, names
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.ports import MasterPort
from kvtier_operator.resources.master import master_flags
from kvtier_operator.resources.objects.containers import Container, Probe, Probes
from kvtier_operator.resources.objects.manifests import selector
from kvtier_operator.resources.objects.places import ANY_ADDRESS, Places
from kvtier_operator.resources.objects.pods import Pod
from kvtier_operator.resources.objects.slots import Command, Slot
from kvtier_operator.resources.objects.workloads import (
    PodSet,
    budget,
    headless_service,
    service,
    slot_config,
    stateful_set,
)

_MEMORY_BYTES = 512 << 20
_GRACE_S = 10
_PROBES = Probes(
    startup=Probe("/health", "admin", period_s=2, failures=150),
    liveness=Probe("/health", "admin", period_s=10, failures=6, timeout_s=5),
    readiness=Probe("/health", "admin", period_s=3, failures=3),
)


def master_objects(places: Places, replicas: int) -> Iterator[tuple[Stage, Manifest]]:
    """Objects of the masters; none if no role uses the store.

    Args:
        places: of the cluster.
        replicas: pods that run now.
    """
    cluster = places.cluster
    if not cluster.uses_store:
        return
    name, selected = names.master_set(cluster.name), selector(cluster, Component.MASTER)
    block = places.group_block(Component.MASTER)
    rpc, admin = block.port(MasterPort.RPC), block.port(MasterPort.ADMIN)
    leading = selected | {labels.MASTER_ROLE: labels.LEADER}
    yield (
        Stage.FOUNDATION,
        headless_service(cluster, name, selected, {"rpc": (rpc, "rpc"), "metrics": (admin, "admin")}),
    )
    yield (
        Stage.FOUNDATION,
        service(
            cluster,
            names.leader_service(cluster.name),
            leading,
            {"rpc": (rpc, "rpc"), "admin": (admin, "admin")},
            selected,
        ),
    )
    if cluster.master.replicas > 1:
        yield Stage.FOUNDATION, budget(cluster, name, selected, {"minAvailable": cluster.master.replicas - 1})
    wanted = PodSet(name, name, replicas, _pod(places, name), places.port_block(Component.MASTER))
    yield Stage.FOUNDATION, slot_config(cluster, wanted, (Slot(slot, ports=(block,)) for slot in range(replicas)))
    yield Stage.MASTERS, stateful_set(cluster, wanted)


def _pod(places: Places, name: str) -> Pod:
    cluster, selected = places.cluster, selector(places.cluster, Component.MASTER)
    block = places.group_block(Component.MASTER)
    # Its own address, not its name: a leader is found by what it writes into etcd, and names are cached for a while
    # after a pod has come back with another address.
    flags = master_flags(cluster, host="$(POD_IP)", ports=block, etcd=places.etcd_endpoints, admin_host=ANY_ADDRESS)
    command = Command(("mooncake_master",), flags, foreign=bool(cluster.images.mooncake))
    container = Container(
        name="master",
        image=cluster.images.mooncake or cluster.images.default,
        pull_policy=cluster.images.pull_policy,
        command=command.render(),
        ports={"rpc": block.port(MasterPort.RPC), "admin": block.port(MasterPort.ADMIN)},
        probes=_PROBES,
        env={"GLOG_minloglevel": "1"},
        memory_bytes=_MEMORY_BYTES,
    )
    return Pod(
        container=container,
        options=cluster.master.pod,
        selector=selected,
        alike=selected,
        grace_s=_GRACE_S,
        annotations=places.port_block(Component.MASTER),
        config=name,
        host_network=cluster.transport.host_network,
    )
