"""What must hold before the client is set up. Mooncake checks almost none of it, and its setup blocks every thread.

Each check returns sentences: what is wrong, with the value and the fix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtier_worker.adapters.mooncake_store.options import P2P_HANDSHAKE, MooncakeOptions
from kvtier_worker.contract import parse_host_port, parse_store_master
from kvtier_worker.log import event
from kvtier_worker.machine.ports import answers, is_unspecified
from kvtier_worker.machine.rdma import SYSFS, rdma_ports, rdma_violations
from kvtier_worker.mooncake_client.environment import PORTS_PER_CLIENT

_LOG = logging.getLogger(__name__)

_UNIX_SOCKETS = Path("/proc/net/unix")

Reach = Callable[[str, int, float], bool]
"""host, port, seconds -> whether somebody accepts connections there."""


def option_violations(options: MooncakeOptions, sysfs: Path = SYSFS) -> tuple[str, ...]:
    """Everything that can be said without the network."""
    return (
        *_master_violations(options),
        *_hostname_violations(options),
        *_protocol_violations(options, sysfs),
        *_number_violations(options),
    )


def _master_violations(options: MooncakeOptions) -> Iterable[str]:
    if options.shm_client:
        return  # the mooncake_client talks to the master
    try:
        master = parse_store_master(options.master)
    except ValueError as error:
        yield f"master address {options.master!r}: {error}; use host:port, or etcd://host:2379;host:2379"
        return
    if master.discovery and not options.cluster_id:
        yield (
            f"master {options.master} is found through etcd, but MC_STORE_CLUSTER_ID is not set; "
            "set it to the masters' --cluster_id"
        )


def _hostname_violations(options: MooncakeOptions) -> Iterable[str]:
    try:
        local = parse_host_port(options.local_hostname)
    except ValueError as error:
        yield f"local hostname {options.local_hostname!r}: {error}; use host:port"
        return
    if is_unspecified(local.host):
        yield f"local hostname {local}: other machines cannot reach {local.host}; use this machine's address"


def _protocol_violations(options: MooncakeOptions, sysfs: Path) -> Iterable[str]:
    if options.protocol == "rdma":
        yield from rdma_violations(options.rdma_devices, rdma_ports(sysfs))
    elif options.protocol != "tcp":
        yield f"protocol {options.protocol!r} is unknown; use tcp or rdma"
    elif options.rdma_devices:
        event(_LOG, "RDMA devices are ignored under tcp", level=logging.WARNING, devices=options.rdma_devices)


def _number_violations(options: MooncakeOptions) -> Iterable[str]:
    if options.replica_num < 1:
        yield f"replica_num {options.replica_num}: at least 1"
    if options.rpc_ports is not None and options.rpc_ports[1] - options.rpc_ports[0] + 1 < PORTS_PER_CLIENT:
        yield f"rpc_ports {options.rpc_ports}: a client needs {PORTS_PER_CLIENT} ports; widen the range"


def master_violation(options: MooncakeOptions, can_reach: Reach = answers) -> str:
    """Why the master cannot be asked; empty = somebody answers. Bounded by a second an endpoint."""
    master = parse_store_master(options.master)
    if any(can_reach(endpoint.host, endpoint.port, 1.0) for endpoint in master.endpoints):
        return ""
    if master.discovery:
        return f"no etcd member of {options.master} answers; start etcd or correct --store_master_server_address"
    return (
        f"no mooncake_master answers at {options.master}; start one or correct --store_master_server_address "
        "(a standby master of an HA group does not answer: use etcd://…)"
    )


def shm_violation(address: str, can_reach: Reach = answers) -> str:
    """Why the mooncake_client at ``address`` cannot serve this process through shared memory; empty = it can."""
    endpoint = parse_host_port(address)
    if not can_reach(endpoint.host, endpoint.port, 1.0):
        return (
            f"no mooncake_client answers at {address}; start one (kvtier store --shm_port) or drop --store_shm_client"
        )
    name = f"@mooncake_client_{endpoint.port}.sock"
    if _UNIX_SOCKETS.exists() and name not in _UNIX_SOCKETS.read_text():
        return (
            f"the mooncake_client at {address} shares no memory with this process ({name} is not in this network "
            "namespace); run both in one pod or with the host's network, or drop --store_shm_client"
        )
    return ""


def needs_label_port(options: MooncakeOptions) -> bool:
    """Whether nobody but us would notice that two clients have one label: Mooncake binds it only with a server."""
    return options.metadata_server == P2P_HANDSHAKE and not options.shm_client
