"""Masters that answer where the hollow pods of a cluster seem to run. IO; for tests against a control plane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus

from kvtier_operator import labels, names
from kvtier_operator.planning.ledger_data import read_slots
from kvtier_operator.planning.ports import MasterPort
from kvtier_operator.testing.api_client import RequestFailed
from kvtier_operator.testing.control_plane import ControlPlane
from kvtier_operator.testing.fake_masters import MasterServers
from kvtier_operator.testing.hollow_nodes import HollowNodes
from kvtier_operator.testing.waiting import wait_for

_MASTERS = 3


@contextmanager
def answering_masters(
    control_plane: ControlPlane, nodes: HollowNodes, namespace: str, cluster: str, pools: Mapping[str, int]
) -> Iterator[MasterServers]:
    """Three masters, as soon as their pods have addresses; master 0 leads and lists every storage node.

    Args:
        control_plane: that knows the cluster.
        nodes: that its pods run on.
        namespace: of the cluster.
        cluster: its name.
        pools: storage nodes by pool.
    """
    workload = names.master_set(cluster)
    with MasterServers(
        wait_for("a set of masters", partial(_admin_port, control_plane, namespace, workload))
    ) as masters:
        for slot in range(_MASTERS):
            pod = names.pod_name(workload, slot)
            address = wait_for(f"an address of {pod}", partial(nodes.address, namespace, pod))
            masters.start(address)
            masters.leader = masters.leader or address
        masters.segments = tuple(
            f"{names.pod_host(names.pod_name(store, slot), store, namespace)}:1"
            for store, size in ((names.store_set(cluster, pool), size) for pool, size in pools.items())
            for slot in range(size)
        )
        yield masters


def _admin_port(control_plane: ControlPlane, namespace: str, workload: str) -> int:
    """As the set's annotation says; 0 while there is no such set."""
    try:
        found = control_plane.api.get(f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{workload}")
    except RequestFailed as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return 0
        raise
    text = found["metadata"].get("annotations", {}).get(labels.PORT_BLOCK, "")
    return next((block.port(MasterPort.ADMIN) for block in read_slots(text).values()), 0)
