"""An engine's command line in the two dialects: our own engine's, and that of xLLM's images. Pure.

Both take the flags of `contract.WorkerSettings`. xLLM has no `--tp_size`: it runs one process a rank, which find one
another by `--master_node_addr`; and it has flags of its own for prefill/decode disaggregation and its router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_worker.contract import WorkerSettings

from kvtier_operator.api import Dialect, Role, RoleType
from kvtier_operator.planning.ports import PortBlock, engine_ports
from kvtier_operator.resources.engine import EnginePlace, StoreAddresses, engine_env, engine_settings
from kvtier_operator.resources.objects.places import ANY_ADDRESS, Places
from kvtier_operator.resources.objects.slots import Command, Slot, split_env, split_flags

_SLOT_FLAGS = frozenset({"master_node_addr", "store_local_hostname"})
_RANK_FLAGS = frozenset({"disagg_pd_port", "node_rank", "port", "transfer_listen_port"})
"""Flags that differ between the processes of an xLLM engine."""
_ROLES = {RoleType.PREFILL: "PREFILL", RoleType.DECODE: "DECODE"}
_ELSEWHERE = frozenset({"tp_size"})
"""Flags that xLLM does not know."""


@dataclass(frozen=True, slots=True)
class EngineLine:
    """Command lines of one role's engines.

    Attributes:
        places: addresses of the cluster.
        role: of the engines.
        model_path: the model's folder in the pod.
    """

    places: Places
    role: Role
    model_path: str

    @property
    def command(self) -> Command:
        """What all engines of the role share."""
        shared, _ = split_flags(self._flags("", self.places.nowhere), self._own_flags)
        if self._is_ours:
            return Command(("kvtier", "engine"), shared)
        return Command(("xllm",), shared, foreign=True, ranks=self.role.tensor)

    @property
    def env(self) -> dict[str, str]:
        """Environment that all engines of the role share."""
        shared, _ = split_env(engine_env(self.role, self.places.nowhere, self.places.master))
        return shared

    @property
    def drain_ms(self) -> int:
        """What an engine takes to finish its requests when it is told to stop."""
        return self._settings("", self.places.nowhere).drain_timeout

    def slot(self, number: int, host: str, block: PortBlock) -> Slot:
        """What one engine has for itself; ``host`` is its pod's name in the network."""
        _, env = split_env(engine_env(self.role, block, self.places.master))
        http = PortBlock(self.role.port, self.role.port + self.places.cluster.api_width(self.role))
        processes = 1 if self._is_ours else self.role.tensor
        ranks = [split_flags(self._flags(host, block, rank), self._own_flags)[1] for rank in range(processes)]
        named = host if self._is_ours and self.role.tiers.store_enabled else ""
        return Slot(number, ranks[0], env, ports=(block, http), host=named, ranks=ranks[1:])

    @property
    def _is_ours(self) -> bool:
        return self.places.cluster.dialect is Dialect.KVTIER

    @property
    def _own_flags(self) -> frozenset[str]:
        return _SLOT_FLAGS if self._is_ours else _SLOT_FLAGS | _RANK_FLAGS

    def _settings(self, host: str, block: PortBlock, rank: int = 0) -> WorkerSettings:
        # xLLM registers the address that it listens on, so that must be one.
        listen = ANY_ADDRESS if self._is_ours else "$(POD_IP)"
        place = EnginePlace(
            model_dir=self.model_path, ports=block, api_port=self.role.port + rank, api_host=listen, store_host=host
        )
        return engine_settings(self.places.cluster, self.role, place, StoreAddresses(self.places.master))

    def _flags(self, host: str, block: PortBlock, rank: int = 0) -> tuple[str, ...]:
        settings = self._settings(host, block, rank)
        if self._is_ours:
            return settings.to_argv()
        known, _ = split_flags(settings.to_argv(), _ELSEWHERE)
        return (*known, *self._xllm_flags(settings), *self._rank_flags(block, rank))

    def _xllm_flags(self, settings: WorkerSettings) -> Sequence[str]:
        """What xLLM must be told beyond our flags."""
        flags: list[str] = []
        if settings.enable_kvcache_store:
            flags.append(f"--store_metadata_server={settings.store_metadata_server}")  # its default is another one
        if self.role.type in _ROLES:
            flags += [f"--instance_role={_ROLES[self.role.type]}", "--enable_disagg_pd=true"]
            flags.append("--kv_cache_transfer_mode=PUSH")
        if self.places.cluster.router:
            flags += router_flags(self.places)
        return flags

    def _rank_flags(self, block: PortBlock, rank: int) -> Sequence[str]:
        """What differs between the processes of an engine."""
        flags = [f"--nnodes={self.role.tensor}", f"--node_rank={rank}"] if self.role.tensor > 1 else []
        if self.role.type in _ROLES:
            ports = engine_ports(self.role)
            flags.append(f"--transfer_listen_port={block.port(ports.transfer + rank)}")
            flags.append(f"--disagg_pd_port={block.port(ports.disaggregation + rank)}")
        return flags


def router_flags(places: Places) -> Sequence[str]:
    """How xLLM's engines and its router find one another."""
    return (
        f"--etcd_addr={','.join(places.etcd_endpoints)}",
        f"--etcd_namespace={places.cluster.effective_cluster_id}",
    )
