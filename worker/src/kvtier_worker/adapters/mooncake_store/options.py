"""Settings of one Mooncake client, and how they follow from the settings of the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_worker.adapters.mooncake_store.breaker import BreakerPolicy
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.contract.addresses import MAX_PORT, store_endpoint
from kvtier_worker.core.ids import Rank
from kvtier_worker.errors import ConfigError
from kvtier_worker.mooncake_client.environment import PORTS_PER_CLIENT

P2P_HANDSHAKE = "P2PHANDSHAKE"


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """One client. Everything is checked again, against the machine, by `MooncakeStore.connect`.

    Attributes:
        master: ``host:port``, or ``etcd://a:2379;b:2379``.
        local_hostname: ``host:port`` label of this client, its own on this machine.
        metadata_server: Transfer Engine metadata.
        protocol: ``tcp`` or ``rdma``.
        rdma_devices: comma separated, empty = all active ones; ignored, with a warning, under tcp.
        shm_client: ``host:port`` of a mooncake_client on this machine to go through by shared memory; empty = none.
        cluster_id: MC_STORE_CLUSTER_ID; needed with etcd.
        rpc_ports: first and last of the ports this client may bind; None = Mooncake's 15000…17000.
        replica_num: replicas of each object put.
        call_timeout_s: after this a call counts as failed.
        breaker: when to stop asking.
        max_batch_keys: objects per call to Mooncake at most.
        max_batch_bytes: bytes per call at most, so that a call ends long before a lease (10 s) does.
        absent_ttl_s: how long a key is taken as absent after its read failed, although the master lists it.
        no_space_pause_s: how long puts are skipped after the store said that it is full.
    """

    master: str
    local_hostname: str
    metadata_server: str = P2P_HANDSHAKE
    protocol: str = "tcp"
    rdma_devices: str = ""
    shm_client: str = ""
    cluster_id: str = ""
    rpc_ports: tuple[int, int] | None = None
    replica_num: int = 1
    call_timeout_s: float = 5.0
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    max_batch_keys: int = 512
    max_batch_bytes: int = 256 << 20
    absent_ttl_s: float = 10.0
    no_space_pause_s: float = 0.5


def options_from_settings(settings: WorkerSettings, rank: Rank, environment: Mapping[str, str]) -> MooncakeOptions:
    """Options of rank ``rank``. Reads MC_STORE_CLUSTER_ID and MC_MIN_RPC_PORT/MC_MAX_RPC_PORT; no other variable.

    The ports between MC_MIN_RPC_PORT and MC_MAX_RPC_PORT are divided among the ranks.

    Raises:
        ConfigError: an address or a port range cannot work; all violations.
    """
    violations: list[str] = []
    local_hostname = ""
    rpc_ports: tuple[int, int] | None = None
    try:
        local_hostname = str(store_endpoint(settings.store_local_hostname, rank))
    except ValueError as error:
        violations.append(f"--store_local_hostname={settings.store_local_hostname}: {error}; use host:base_port")
    try:
        rpc_ports = rank_ports(environment, rank, settings.tp_size)
    except ValueError as error:
        violations.append(str(error))
    if violations:
        raise ConfigError(violations)
    timeout_s = settings.store_call_timeout / 1000
    return MooncakeOptions(
        master=settings.store_master_server_address,
        local_hostname=local_hostname,
        metadata_server=settings.store_metadata_server,
        protocol=settings.store_protocol,
        rdma_devices=settings.store_rdma_devices,
        shm_client=settings.store_shm_client,
        cluster_id=environment.get("MC_STORE_CLUSTER_ID", ""),
        rpc_ports=rpc_ports,
        replica_num=settings.store_replica_num,
        call_timeout_s=timeout_s,
        breaker=BreakerPolicy(costly_call_s=timeout_s),
    )


def rank_ports(environment: Mapping[str, str], rank: int, ranks: int) -> tuple[int, int] | None:
    """This rank's share of MC_MIN_RPC_PORT…MC_MAX_RPC_PORT, first and last; None when they are not set.

    Raises:
        ValueError: only one of the two is set, they are no ports, or a rank would get fewer than two.
    """
    first_text, last_text = environment.get("MC_MIN_RPC_PORT", ""), environment.get("MC_MAX_RPC_PORT", "")
    if not first_text and not last_text:
        return None
    given = f"MC_MIN_RPC_PORT={first_text} MC_MAX_RPC_PORT={last_text}"
    if not (first_text.isdecimal() and last_text.isdecimal()):
        raise ValueError(f"{given}: set both, to port numbers, or neither")
    first, last = int(first_text), int(last_text)
    share = (last - first + 1) // ranks
    if first < 1 or last > MAX_PORT or share < PORTS_PER_CLIENT:
        raise ValueError(
            f"{given}: {ranks} rank(s) need {PORTS_PER_CLIENT} ports each between 1 and {MAX_PORT}; widen the range"
        )
    return first + rank * share, first + (rank + 1) * share - 1
