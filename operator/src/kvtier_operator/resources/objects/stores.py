"""The pools of storage nodes: a set, Service, budget and ConfigMap each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvtier_worker.contract import HostPort

from kvtier_operator import names
from kvtier_operator.api import DrainMode, StoreKind, StorePool
from kvtier_operator.observed import Component, Manifest
from kvtier_operator.planning.layout import Stage
from kvtier_operator.planning.ports import PortBlock, StorePort
from kvtier_operator.resources.objects.containers import Container, Probe, Probes
from kvtier_operator.resources.objects.manifests import selector
from kvtier_operator.resources.objects.places import ANY_ADDRESS, Places
from kvtier_operator.resources.objects.pods import Pod
from kvtier_operator.resources.objects.slots import Command, Slot, split_env, split_flags
from kvtier_operator.resources.objects.workloads import PodSet, budget, headless_service, slot_config, stateful_set
from kvtier_operator.resources.store import store_env, store_flags

_HEADROOM_BYTES = 512 << 20
"""Memory of a node beyond its segment."""
_STOP_MARGIN_S = 15
_LONGEST_LAST_DRAIN_MS = 120_000
"""A node that is told to stop without the operator having drained it (its machine is emptied) tries for so long."""
_OWN_FLAGS = frozenset({"host", "master_admin_address", "port"})
"""Not the masters' addresses in the template: with another number of masters every node would be drained and made anew.
Each has those of its last start, and first the leader's, which stays."""


def store_objects(places: Places, replicas: Mapping[str, int]) -> Iterator[tuple[Stage, Manifest]]:
    """Objects of all pools; none if no role uses the store.

    Args:
        places: of the cluster.
        replicas: pods that run now, by pool.
    """
    if not places.cluster.uses_store:
        return
    for pool in places.cluster.pools:
        yield from _PoolBuilder(places, pool).objects(replicas.get(pool.name, 0))


@dataclass(frozen=True, slots=True)
class _PoolBuilder:
    places: Places
    pool: StorePool

    @property
    def _name(self) -> str:
        return names.store_set(self.places.cluster.name, self.pool.name)

    @property
    def _selected(self) -> dict[str, str]:
        return selector(self.places.cluster, Component.STORE, pool=self.pool.name)

    @property
    def _blocks(self) -> Mapping[int, PortBlock]:
        return self.places.slot_blocks(Component.STORE, self.pool.name)

    @property
    def _http_port(self) -> int:
        """Port of every node's health and metrics: a template has one probe, so it cannot follow the slot.

        It is slot 0's. No other pod of the pool is on the same node where that would matter.
        """
        return self._blocks.get(0, self.places.nowhere).port(StorePort.HTTP)

    def objects(self, replicas: int) -> Iterator[tuple[Stage, Manifest]]:
        cluster = self.places.cluster
        assert set(range(replicas)) <= set(self._blocks), f"{self._name} has too few port blocks for {replicas} pods"
        ports = self.places.port_block(Component.STORE, self.pool.name)
        wanted = PodSet(self._name, self._name, replicas, self._pod(), ports)
        yield (
            Stage.FOUNDATION,
            headless_service(cluster, self._name, self._selected, {"metrics": (self._http_port, "http")}),
        )
        if self.pool.replicas > 1:
            yield Stage.FOUNDATION, budget(cluster, self._name, self._selected, {"maxUnavailable": 1})
        yield Stage.FOUNDATION, slot_config(cluster, wanted, (self._slot(slot) for slot in self._blocks))
        yield Stage.STORE, stateful_set(cluster, wanted)

    def _slot(self, slot: int) -> Slot:
        block = self._blocks[slot]
        host = self.places.host(self._name, slot, self._name)
        _, flags = split_flags(self._flags(host, block), _OWN_FLAGS)
        _, env = split_env(store_env(self.pool, block, self.places.master))
        http = PortBlock(self._http_port, self._http_port + 1)
        return Slot(slot, flags, env, ports=(block,) if block.meets(http) else (block, http), host=host)

    def _pod(self) -> Pod:
        cluster, pool = self.places.cluster, self.pool
        ours = pool.kind is StoreKind.KVTIER
        image = cluster.images.default if ours else cluster.images.mooncake or cluster.images.default
        shared, _ = split_flags(self._flags("", self.places.nowhere), _OWN_FLAGS)
        env, _ = split_env(store_env(pool, self.places.nowhere, self.places.master))
        command = Command(
            ("kvtier", "store") if ours else ("mooncake_client",),
            shared,
            foreign=not ours and bool(cluster.images.mooncake),
        )
        container = Container(
            name="store",
            image=image,
            pull_policy=cluster.images.pull_policy,
            command=command.render(),
            ports={"http": self._http_port},
            probes=_probes("/ready" if ours else "/health"),
            env=env,
            memory_bytes=pool.segment_bytes + _HEADROOM_BYTES,
        )
        return Pod(
            container=container,
            options=pool.pod,
            selector=self._selected,
            alike=self._selected,
            grace_s=_STOP_MARGIN_S + (self._last_drain_ms // 1000 if ours else 0),
            config=self._name,
            host_network=cluster.transport.host_network,
        )

    def _flags(self, host: str, block: PortBlock) -> tuple[str, ...]:
        transport = replace(self.places.cluster.transport, shared_memory=False)  # pods share none
        http = HostPort(ANY_ADDRESS, self._http_port)
        flags = store_flags(self.pool, transport, host=host, ports=block, master=self.places.master, http=http)
        return (*flags, *self._drain_flags())

    def _drain_flags(self) -> tuple[str, ...]:
        if self.pool.kind is not StoreKind.KVTIER or not self._last_drain_ms:
            return ()
        admins = ";".join(self.places.master_admins)
        return (f"--master_admin_address={admins}", f"--drain_timeout={self._last_drain_ms}")

    @property
    def _last_drain_ms(self) -> int:
        drain = self.pool.drain
        return min(drain.timeout_ms, _LONGEST_LAST_DRAIN_MS) if drain.mode is DrainMode.MIGRATE else 0


def _probes(ready: str) -> Probes:
    return Probes(
        startup=Probe("/health", "http", period_s=2, failures=300),
        liveness=Probe("/health", "http", period_s=10, failures=6, timeout_s=5),
        readiness=Probe(ready, "http", period_s=3, failures=2),
    )
