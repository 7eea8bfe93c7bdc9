"""Where the components of a cluster find one another: blocks of ports, names of pods. Pure.

Everybody who dials somebody gets the address from here, so that no two can differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier_operator import labels, names
from kvtier_operator.api import KVCacheCluster
from kvtier_operator.observed import Component
from kvtier_operator.planning.in_use import annotation_of
from kvtier_operator.planning.ledger import BlockKey
from kvtier_operator.planning.ports import EtcdPort, MasterPort, PortBlock
from kvtier_operator.planning.wants import ALL_PODS, block_key, owner_of
from kvtier_operator.resources.etcd import EtcdMember
from kvtier_operator.resources.master import MasterAddress, master_address

ANY_ADDRESS: Final = "0.0.0.0"  # noqa: S104 - pods listen to their network; policies say who gets in
_WIDEST = 1024


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of one cluster's pods.

    Attributes:
        cluster: whose.
        blocks: its ports.
    """

    cluster: KVCacheCluster
    blocks: Mapping[BlockKey, PortBlock]

    @property
    def _owner(self) -> str:
        return owner_of(self.cluster)

    def group_block(self, component: Component) -> PortBlock:
        """Ports of every pod of a component that has one block for all of them.

        A component without pods has no ports: then its template shows the start of the range, and nobody runs it.
        """
        return self.blocks.get(block_key(self._owner, component), self.nowhere)

    def slot_blocks(self, component: Component, group: str, lane: str = "") -> dict[int, PortBlock]:
        """Blocks by slot of a pool's or role's pods."""
        wanted = block_key(self._owner, component, group, lane)
        return {
            key.slot: block
            for key, block in sorted(self.blocks.items(), key=lambda item: item[0])
            if (key.cluster, key.group, key.lane) == (wanted.cluster, wanted.group, wanted.lane)
            and key.slot != ALL_PODS
        }

    def port_block(self, component: Component, group: str = "", lane: str = "") -> dict[str, str]:
        """The annotation of a workload that says which ports its pods have; a lost ledger is made again from it."""
        text = annotation_of(self.cluster, component, group, lane, self.blocks)
        return {labels.PORT_BLOCK: text} if text else {}

    @property
    def nowhere(self) -> PortBlock:
        """Stands in a template where no pod will ever look."""
        start = self.cluster.transport.ports.start
        return PortBlock(start, start + _WIDEST)

    def host_of(self, pod: str, service: str) -> str:
        """Name at which others reach a pod of a set."""
        return names.pod_host(pod, service, self.cluster.metadata.namespace)

    def host(self, workload: str, slot: int, service: str) -> str:
        """Name of one pod."""
        return self.host_of(names.pod_name(workload, slot), service)

    @property
    def etcd_members(self) -> tuple[EtcdMember, ...]:
        """Of the managed etcd: as many as the manifest says, however many run."""
        managed = self.cluster.coordination.managed
        name = names.etcd_set(self.cluster.name)
        ports = self.group_block(Component.ETCD)
        count = managed.replicas if managed else 0
        pods = (names.pod_name(name, slot) for slot in range(count))
        client, peer = ports.port(EtcdPort.CLIENT), ports.port(EtcdPort.PEER)
        return tuple(EtcdMember(pod, self.host_of(pod, name), client, peer) for pod in pods)

    @property
    def etcd_endpoints(self) -> tuple[str, ...]:
        """host:port of every member, managed or not; empty = no etcd."""
        return self.cluster.coordination.external or tuple(member.endpoint for member in self.etcd_members)

    @property
    def master(self) -> MasterAddress:
        """How clients find the serving master."""
        name = names.master_set(self.cluster.name)
        ports = self.group_block(Component.MASTER)
        return master_address(self.cluster, self.host(name, 0, name), ports, self.etcd_endpoints)

    @property
    def master_admins(self) -> tuple[str, ...]:
        """host:port of the admin API of the leader, then of every master: the leader's label may be late."""
        name, namespace = names.master_set(self.cluster.name), self.cluster.metadata.namespace
        port = self.group_block(Component.MASTER).port(MasterPort.ADMIN)
        leader = names.service_host(names.leader_service(self.cluster.name), namespace)
        masters = (self.host(name, slot, name) for slot in range(self.cluster.master.replicas))
        return tuple(f"{host}:{port}" for host in (leader, *masters))
