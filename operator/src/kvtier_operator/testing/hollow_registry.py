"""Registers nodes that have no kubelet, keeps them alive in the eyes of the controllers, removes them. IO.

Called by `hollow_nodes`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus

from kvtier_operator.testing.api_client import ApiClient, Json, RequestFailed

NUM_ZONES = 3
ACCEPT_TIMEOUT_S = 30.0
POLL_S = 0.05
NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_NOT_READY = "node.kubernetes.io/not-ready"


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What each node offers.

    Attributes:
        resources: capacity, as in ``{"cpu": "64"}``.
        labels: beside the host name, the zone and the usual ones.
    """

    resources: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "500"}
    )
    labels: Mapping[str, str] = field(default_factory=dict)


class NodeRegistry:
    """The nodes of one `HollowNodes`.

    Args:
        api: of the control plane, as its admin.
        addresses: of the nodes, by name.
        shape: what each offers.
    """

    def __init__(self, api: ApiClient, addresses: Mapping[str, str], shape: NodeShape) -> None:
        self._api = api
        self._addresses = addresses
        self._shape = shape

    def register(self) -> None:
        """Make the nodes, instead of former ones with their names."""
        self.beat()
        for index, (name, address) in enumerate(self._addresses.items()):
            with suppress(RequestFailed):
                self._api.delete(f"{NODES}/{name}")
            self._api.create(NODES, node_manifest(name, f"zone-{index % NUM_ZONES}", address, self._shape))

    def wait_accepted(self) -> None:
        """Return when the scheduler may use the nodes."""
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while waiting := [name for name in self._addresses if self._is_tainted(name)]:
            assert time.monotonic() < deadline, f"the controller manager does not accept {', '.join(waiting)}"
            time.sleep(POLL_S)

    def beat(self) -> None:
        """Renew the leases by which the controllers know that nodes live."""
        for name in self._addresses:
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": f"{datetime.now(UTC):%FT%T.%fZ}"}
            try:
                self._api.patch(f"{LEASES}/{name}", {"spec": spec})
            except RequestFailed as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    self._create_lease(name, spec)

    def remove(self) -> None:
        """Remove the nodes and their leases."""
        for name in self._addresses:
            for collection in (NODES, LEASES):
                with suppress(RequestFailed):
                    self._api.delete(f"{collection}/{name}")

    def _create_lease(self, name: str, spec: Json) -> None:
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        # The namespace may be too young; the next beat tries again, long before anybody misses the lease.
        with suppress(RequestFailed):
            self._api.create(LEASES, body)

    def _is_tainted(self, name: str) -> bool:
        taints = self._api.get(f"{NODES}/{name}")["spec"].get("taints", ())
        return any(taint["key"] == _NOT_READY for taint in taints)


def timestamp() -> str:
    """Now, as Kubernetes writes times."""
    return f"{datetime.now(UTC):%FT%TZ}"


def node_manifest(name: str, zone: str, address: str, shape: NodeShape) -> Json:
    """A node as a kubelet registers it when everything is fine."""
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": zone,
    }
    now = timestamp()
    healthy = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
    conditions = [
        {"type": kind, "status": value, "reason": "Hollow", "lastHeartbeatTime": now, "lastTransitionTime": now}
        for kind, value in healthy.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels | dict(shape.labels)},
        "status": {
            "capacity": dict(shape.resources),
            "allocatable": dict(shape.resources),
            "conditions": conditions,
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
        },
    }
