"""KVCacheCluster → its processes on one machine in start order: etcd, masters, storage nodes, engines. Pure.

Every process but the engines' HTTP APIs gets a loopback address of its own, as pods have. Mooncake binds its data ports
on all of them, so the blocks of ports are disjoint all the same. Stop order is the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from kvtier_operator.api import KVCacheCluster, StorePool
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.planning.ports import PortBlock, PortWant, allocate, ports_needed
from kvtier_operator.resources.engine import (
    EnginePlace,
    StoreAddresses,
    engine_name,
    engine_ports,
    engine_process,
    engine_settings,
)
from kvtier_operator.resources.etcd import ETCD_PORTS, etcd_member, etcd_name, etcd_process
from kvtier_operator.resources.master import MASTER_PORTS, MasterAddress, master_address, master_name, master_process
from kvtier_operator.resources.processes import LOOPBACK, ProcessSpec, Programs
from kvtier_operator.resources.store import STORE_PORTS, shm_address, store_name, store_process

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
    slots: Mapping[str, _Slot]
    model_dir: str
    programs: Programs
    state_dir: str

    def processes(self) -> Iterator[ProcessSpec]:
        yield from self._etcd()
        yield from self._masters()
        yield from self._stores()
        yield from self._engines()

    def _etcd(self) -> Iterator[ProcessSpec]:
        slots = [self.slots[etcd_name(index)] for index in range(_etcd_members(self.cluster))]
        members = [etcd_member(index, slot.host, slot.ports) for index, slot in enumerate(slots)]
        for member in members:
            folder = str(PurePath(self.state_dir, member.name))
            token = self.cluster.effective_cluster_id
            yield etcd_process(member, members, data_dir=folder, token=token, programs=self.programs)

    def _masters(self) -> Iterator[ProcessSpec]:
        slots = [self.slots[master_name(index)] for index in range(_masters(self.cluster))]
        hosts, blocks = [slot.host for slot in slots], [slot.ports for slot in slots]
        for index in range(len(slots)):
            yield master_process(index, self.cluster, hosts, blocks, etcd=self._endpoints(), programs=self.programs)

    def _stores(self) -> Iterator[ProcessSpec]:
        for pool, index in _nodes(self.cluster):
            name = store_name(pool.name, index)
            slot = self.slots[name]
            yield store_process(
                name,
                pool,
                self.cluster.transport,
                host=slot.host,
                ports=slot.ports,
                master=self._master(),
                programs=self.programs,
            )

    def _engines(self) -> Iterator[ProcessSpec]:
        master, shm = self._master(), self._shm_addresses()
        for number, role in enumerate(self.cluster.roles):
            for index in range(role.replicas):
                name = engine_name(role.name, index)
                slot = self.slots[name]
                place = EnginePlace(self.model_dir, slot.ports, role.port + index, store_host=slot.host)
                store = StoreAddresses(master, shm[index % len(shm)] if shm else "")
                settings = engine_settings(self.cluster, role, place, store)
                if refusals := settings.violations():
                    raise SpecError([Violation(f"spec.roles[{number}]", role.name, refusal) for refusal in refusals])
                yield engine_process(name, role, settings, slot.ports, master, self.programs)

    def _endpoints(self) -> tuple[str, ...]:
        managed = (self.slots[etcd_name(index)] for index in range(_etcd_members(self.cluster)))
        return self.cluster.coordination.external or tuple(
            etcd_member(index, slot.host, slot.ports).endpoint for index, slot in enumerate(managed)
        )

    def _master(self) -> MasterAddress:
        if not _masters(self.cluster):
            return MasterAddress()
        first = self.slots[master_name(0)]
        return master_address(self.cluster, first.host, first.ports, self._endpoints())

    def _shm_addresses(self) -> tuple[str, ...]:
        if not self.cluster.transport.shared_memory:
            return ()
        slots = (self.slots[store_name(pool.name, index)] for pool, index in _nodes(self.cluster))
        return tuple(shm_address(slot.host, slot.ports) for slot in slots)


def _masters(cluster: KVCacheCluster) -> int:
    return cluster.master.replicas if cluster.uses_store else 0


def _etcd_members(cluster: KVCacheCluster) -> int:
    managed = cluster.coordination.managed
    return managed.replicas if managed and cluster.uses_store else 0


def _nodes(cluster: KVCacheCluster) -> tuple[tuple[StorePool, int], ...]:
    return tuple((pool, index) for pool in cluster.pools for index in range(pool.replicas))


def _slots(cluster: KVCacheCluster) -> Mapping[str, _Slot]:
    # Shared memory is reached at 127.0.0.1: `kvtier store` looks for its own door there.
    shared = cluster.transport.shared_memory
    blocks = _port_blocks(cluster)
    return {
        name: _Slot(block, LOOPBACK if shared else _own_address(number))
        for number, (name, block) in enumerate(blocks.items())
    }


def _own_address(number: int) -> str:
    net, host = divmod(number, _HOSTS_PER_NET)
    return f"127.0.{1 + net}.{1 + host}"


def _port_blocks(cluster: KVCacheCluster) -> Mapping[str, PortBlock]:
    wants = [PortWant(etcd_name(index), ETCD_PORTS) for index in range(_etcd_members(cluster))]
    wants += (PortWant(master_name(index), MASTER_PORTS) for index in range(_masters(cluster)))
    wants += (PortWant(store_name(pool.name, index), STORE_PORTS) for pool, index in _nodes(cluster))
    wants += (
        PortWant(engine_name(role.name, index), engine_ports(role))
        for role in cluster.roles
        for index in range(role.replicas)
    )
    needed = ports_needed(wants)
    if needed > cluster.transport.ports.size:
        fix = f"this cluster needs {needed} ports; write at least that"
        raise SpecError([Violation("spec.transport.ports.range.size", cluster.transport.ports.size, fix)])
    return allocate(cluster.transport.ports, wants)
