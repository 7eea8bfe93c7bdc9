"""KVCacheCluster → its processes in start order: master, storage nodes, engines. Stop order is the reverse. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvtier_operator.api import KVCacheCluster, StorePool
from kvtier_operator.errors import SpecError, Violation
from kvtier_operator.planning.ports import PortBlock, PortWant, allocate, ports_needed
from kvtier_operator.resources.engine import (
    StoreAddresses,
    engine_name,
    engine_ports,
    engine_process,
    engine_settings,
)
from kvtier_operator.resources.master import MASTER_PORTS, master_address, master_name, master_process
from kvtier_operator.resources.processes import ProcessSpec, Programs
from kvtier_operator.resources.store import STORE_PORTS, shm_address, store_name, store_process


def plan_processes(cluster: KVCacheCluster, model_dir: str, programs: Programs) -> tuple[ProcessSpec, ...]:
    """Every process of a cluster on one machine, in start order.

    Args:
        cluster: a parsed manifest.
        model_dir: the model's folder.
        programs: commands of that machine.

    Raises:
        SpecError: the port range is too small, or an engine would refuse its settings.
    """
    blocks = _port_blocks(cluster)
    return (
        *_master_processes(cluster, blocks, programs),
        *_store_processes(cluster, blocks, programs),
        *_engine_processes(cluster, blocks, model_dir, programs),
    )


def _master_processes(
    cluster: KVCacheCluster, blocks: Mapping[str, PortBlock], programs: Programs
) -> Iterator[ProcessSpec]:
    if cluster.uses_store:
        for index in range(cluster.master.replicas):
            yield master_process(index, cluster.master, blocks[master_name(index)], programs)


def _store_processes(
    cluster: KVCacheCluster, blocks: Mapping[str, PortBlock], programs: Programs
) -> Iterator[ProcessSpec]:
    for pool, index in _nodes(cluster):
        yield store_process(
            index,
            pool,
            cluster.transport,
            master=_master(cluster, blocks),
            ports=blocks[store_name(pool.name, index)],
            programs=programs,
        )


def _engine_processes(
    cluster: KVCacheCluster, blocks: Mapping[str, PortBlock], model_dir: str, programs: Programs
) -> Iterator[ProcessSpec]:
    shm = _shm_addresses(cluster, blocks)
    for number, role in enumerate(cluster.roles):
        for index in range(role.replicas):
            ports = blocks[engine_name(role.name, index)]
            store = StoreAddresses(_master(cluster, blocks), shm[index % len(shm)] if shm else "")
            settings = engine_settings(cluster, role, index, model_dir=model_dir, ports=ports, store=store)
            if refusals := settings.violations():
                raise SpecError([Violation(f"spec.roles[{number}]", role.name, refusal) for refusal in refusals])
            yield engine_process(role, index, settings, ports, programs)


def _master(cluster: KVCacheCluster, blocks: Mapping[str, PortBlock]) -> str:
    return master_address(blocks[master_name(0)]) if cluster.uses_store else ""


def _nodes(cluster: KVCacheCluster) -> tuple[tuple[StorePool, int], ...]:
    return tuple((pool, index) for pool in cluster.pools for index in range(pool.replicas))


def _shm_addresses(cluster: KVCacheCluster, blocks: Mapping[str, PortBlock]) -> tuple[str, ...]:
    if not cluster.transport.shared_memory:
        return ()
    return tuple(shm_address(blocks[store_name(pool.name, index)]) for pool, index in _nodes(cluster))


def _port_blocks(cluster: KVCacheCluster) -> Mapping[str, PortBlock]:
    wants: list[PortWant] = []
    if cluster.uses_store:
        wants += (PortWant(master_name(index), MASTER_PORTS) for index in range(cluster.master.replicas))
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
