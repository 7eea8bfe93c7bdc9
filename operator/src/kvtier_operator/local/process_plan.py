"""KVCacheCluster → its processes on one machine in start order: etcd, masters, storage nodes, engines. Pure.

Every process but the engines' HTTP APIs gets a loopback address of its own, as pods have. Mooncake binds its data ports
on all of them, so the blocks of ports are disjoint all the same. Stop order is the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import PurePath

from kvtier_operator.api import KVCacheCluster, StorePool
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.observed import Component
from kvtier_operator.planning.ledger import BlockKey
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.planning.wants import allocate_locally, local_key, owner_of
from kvtier_operator.resources.engine import (
    EnginePlace,
    StoreAddresses,
    engine_name,
    engine_process,
    engine_settings,
)
from kvtier_operator.resources.etcd import EtcdMember, etcd_member, etcd_process
from kvtier_operator.resources.master import MasterAddress, master_address, master_process
from kvtier_operator.resources.processes import LOOPBACK, ProcessSpec, Programs
from kvtier_operator.resources.store import shm_address, store_name, store_process

_HOSTS_PER_NET = 254


def plan_processes(
    cluster: KVCacheCluster, model_dir: str, programs: Programs, state_dir: str = ".kvtier"
) -> tuple[ProcessSpec, ...]:
    """Every process of a cluster on one machine, in start order.

    Args:
        cluster: a parsed manifest.
        model_dir: the model's folder.
        programs: commands of that machine.
        state_dir: folder below which processes keep data.

    Raises:
        SpecError: the port range is too small, or an engine would refuse its settings.
    """
    return tuple(_Planner(cluster, _slots(cluster), model_dir, programs, state_dir).processes())


@dataclass(frozen=True, slots=True)
class _Slot:
    """What one process has to itself."""

    ports: PortBlock
    host: str


@dataclass(frozen=True, slots=True)
class _Planner:
    cluster: KVCacheCluster
    slots: Mapping[BlockKey, _Slot]
    model_dir: str
    programs: Programs
    state_dir: str

    def processes(self) -> Iterator[ProcessSpec]:
        yield from self._etcd()
        yield from self._masters()
        yield from self._stores()
        yield from self._engines()

    def _etcd(self) -> Iterator[ProcessSpec]:
        members = self._members()
        token = self.cluster.effective_cluster_id
        for member in members:
            folder = str(PurePath(self.state_dir, member.name))
            yield etcd_process(member, members, data_dir=folder, token=token, programs=self.programs)

    def _masters(self) -> Iterator[ProcessSpec]:
        slots = self._group(Component.MASTER)
        hosts, blocks = [slot.host for slot in slots], [slot.ports for slot in slots]
        for index in range(len(slots)):
            yield master_process(index, self.cluster, hosts, blocks, etcd=self._endpoints(), programs=self.programs)

    def _stores(self) -> Iterator[ProcessSpec]:
        transport, master = self.cluster.transport, self._master()
        for pool, index, slot in self._nodes():
            name = store_name(pool.name, index)
            yield store_process(
                name, pool, transport, host=slot.host, ports=slot.ports, master=master, programs=self.programs
            )

    def _engines(self) -> Iterator[ProcessSpec]:
        master, shm = self._master(), self._shm_addresses()
        for number, role in enumerate(self.cluster.roles):
            for index, slot in enumerate(self._group(Component.ENGINE, role.name)):
                place = EnginePlace(self.model_dir, slot.ports, role.port + index, store_host=slot.host)
                store = StoreAddresses(master, shm[index % len(shm)] if shm else "")
                settings = engine_settings(self.cluster, role, place, store)
                if refusals := settings.violations():
                    raise SpecError([Violation(f"spec.roles[{number}]", role.name, refusal) for refusal in refusals])
                name = engine_name(role.name, index)
                yield engine_process(name, role, settings, ports=slot.ports, master=master, programs=self.programs)

    def _members(self) -> tuple[EtcdMember, ...]:
        slots = self._group(Component.ETCD)
        return tuple(etcd_member(index, slot.host, slot.ports) for index, slot in enumerate(slots))

    def _endpoints(self) -> tuple[str, ...]:
        return self.cluster.coordination.external or tuple(member.endpoint for member in self._members())

    def _master(self) -> MasterAddress:
        masters = self._group(Component.MASTER)
        if not masters:
            return MasterAddress()
        return master_address(self.cluster, masters[0].host, masters[0].ports, self._endpoints())

    def _shm_addresses(self) -> tuple[str, ...]:
        if not self.cluster.transport.shared_memory:
            return ()
        return tuple(shm_address(slot.host, slot.ports) for _, _, slot in self._nodes())

    def _nodes(self) -> Iterator[tuple[StorePool, int, _Slot]]:
        for pool in self.cluster.pools:
            for index, slot in enumerate(self._group(Component.STORE, pool.name)):
                yield pool, index, slot

    def _group(self, component: Component, group: str = "") -> tuple[_Slot, ...]:
        """Slots of a component that exist, in order."""
        keys = (local_key(owner_of(self.cluster), component, group, index) for index in count())
        return tuple(self.slots[key] for key in takewhile(self.slots.__contains__, keys))


def _slots(cluster: KVCacheCluster) -> Mapping[BlockKey, _Slot]:
    allocation = allocate_locally(cluster)
    if allocation.refused:
        size = cluster.transport.ports.size
        fix = f"this cluster needs {size + allocation.missing} ports; write at least that"
        raise SpecError([Violation("spec.transport.ports.range.size", size, fix)])
    # Shared memory is reached at 127.0.0.1: `kvtier store` looks for its own door there.
    shared = cluster.transport.shared_memory
    return {
        key: _Slot(block, LOOPBACK if shared else _own_address(number))
        for number, (key, block) in enumerate(allocation.blocks.items())
    }


def _own_address(number: int) -> str:
    net, host = divmod(number, _HOSTS_PER_NET)
    return f"127.0.{1 + net}.{1 + host}"
