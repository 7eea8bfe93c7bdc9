"""From options to a client that is set up: checks, environment, import, version probe, setup, memory placement.

Two placements. Embedded: this process is a Mooncake client of its own, over TCP or RDMA. Shared memory: a
mooncake_client on this machine does the work and copies straight into memory that it shares with us.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kvtier_worker.adapters.mooncake_store.checks import (
    master_violation,
    needs_label_port,
    option_violations,
    shm_violation,
)
from kvtier_worker.adapters.mooncake_store.options import MooncakeOptions
from kvtier_worker.contract import parse_host_port, parse_store_master
from kvtier_worker.errors import StoreUnavailable
from kvtier_worker.machine.memory import PageMemory, allocate_pages, physical_memory_bytes
from kvtier_worker.machine.ports import answers, hold_port, port_holder
from kvtier_worker.mooncake_client.environment import apply_environment, client_environment
from kvtier_worker.mooncake_client.guard import GuardedClient, RawClient
from kvtier_worker.mooncake_client.library import EMBEDDED_CALLS, SHARED_CALLS, load_mooncake

_LOG = logging.getLogger(__name__)

_LOOK_S = 0.3
_LOCAL_BUFFER_BYTES = 0
"""Only calls that copy through Mooncake's own buffer need one; all of ours are zero-copy."""


@dataclass(slots=True)
class Connection:
    """A client that is set up, and what belongs to it.

    Attributes:
        client: the guarded client.
        replicate_config: Mooncake's record for puts.
        shared_memory: whether memory must come from the client's pool.
        reachable: a quick look whether the store answers.
        keep_on_close: whether closing would take half a minute (HA groups); see `mooncake_client.leaving`.
        label: keeps the port of `MooncakeOptions.local_hostname` to ourselves; empty when not needed.
        clock: monotonic seconds.
    """

    client: GuardedClient
    replicate_config: Any
    shared_memory: bool
    reachable: Callable[[], bool]
    keep_on_close: bool = False
    label: Sequence[socket.socket] = ()
    clock: Callable[[], float] = time.monotonic
    _pages: list[PageMemory] = field(default_factory=list)

    def allocate(self, raw: RawClient, nbytes: int) -> int:
        """Address of zeroed memory for this placement.

        Raises:
            StoreUnavailable: there is not enough.
        """
        if self.shared_memory:
            address = raw.alloc_from_mem_pool(nbytes)
            if not address:
                raise StoreUnavailable(f"the pool shared with the mooncake_client has no {nbytes} bytes left")
            return address
        try:
            pages = allocate_pages(nbytes)
        except OSError as error:
            raise StoreUnavailable(f"cannot allocate {nbytes} bytes of host memory: {error}") from error
        if pages.problem:
            _LOG.warning("host memory is not locked: %s", pages.problem)
        self._pages.append(pages)
        return pages.address

    def close(self, registered: Sequence[int]) -> None:
        """Close the client, then give memory and port back."""
        self.client.close(registered, keep=self.keep_on_close)
        self._pages.clear()
        for held in self.label:
            held.close()


def open_connection(options: MooncakeOptions) -> Connection:
    """Set a client up.

    Raises:
        StoreUnavailable: every reason that can be told, each with its fix.
    """
    violations = option_violations(options)
    if not violations:
        problem = shm_violation(options.shm_client) if options.shm_client else master_violation(options)
        violations = (problem,) if problem else ()
    if violations:
        raise StoreUnavailable("; ".join(violations))
    if os.environ.get("DEVICE_NAMES"):
        _LOG.info("DEVICE_NAMES is ignored; name devices with --store_rdma_devices")
    variables = client_environment(
        call_timeout_s=options.call_timeout_s,
        protocol=options.protocol,
        rpc_ports=options.rpc_ports,
        cluster_id=options.cluster_id,
    )
    apply_environment(variables, os.environ)
    module = load_mooncake(SHARED_CALLS if options.shm_client else EMBEDDED_CALLS)
    label = _hold_label(options) if needs_label_port(options) else ()
    try:
        raw = _set_up_shared(module, options) if options.shm_client else _set_up_embedded(module, options)
    except StoreUnavailable:
        for held in label:
            held.close()
        raise
    config = module.ReplicateConfig()
    config.replica_num = options.replica_num
    return Connection(
        client=GuardedClient(raw),
        replicate_config=config,
        shared_memory=bool(options.shm_client),
        reachable=_quick_look(options),
        keep_on_close=not options.shm_client and parse_store_master(options.master).discovery,
        label=label,
    )


def _hold_label(options: MooncakeOptions) -> Sequence[socket.socket]:
    local = parse_host_port(options.local_hostname)
    try:
        return (hold_port(local.host, local.port),)
    except OSError as error:
        holder = f", held by {port_holder(local.port)}" if error.errno == errno.EADDRINUSE else ""
        raise StoreUnavailable(
            f"the store client's address {local} cannot be bound ({error.strerror or error}{holder}); "
            "choose another base port or address in --store_local_hostname (rank i uses base port + i)"
        ) from error


def _set_up_embedded(module: ModuleType, options: MooncakeOptions) -> RawClient:
    raw = module.MooncakeDistributedStore()
    try:
        code = raw.setup(
            options.local_hostname,
            options.metadata_server,
            0,
            _LOCAL_BUFFER_BYTES,
            options.protocol,
            options.rdma_devices if options.protocol == "rdma" else "",
            options.master,
        )
    except MemoryError as error:
        raise StoreUnavailable(
            "mooncake could not get its memory; unset MC_STORE_USE_HUGEPAGE or reserve huge pages"
        ) from error
    if code != 0:
        raise StoreUnavailable(f"mooncake setup failed ({code}) with master {options.master}: {_setup_hint(options)}")
    client: RawClient = raw
    return client


def _setup_hint(options: MooncakeOptions) -> str:
    master = parse_store_master(options.master)
    if master.discovery:
        return (
            f"no leader of cluster {options.cluster_id!r} is registered there; "
            "compare MC_STORE_CLUSTER_ID with the masters' --cluster_id and wait for a leader"
        )
    if options.rpc_ports is not None:
        return f"check that two ports of {options.rpc_ports[0]}…{options.rpc_ports[1]} are free and the master serves"
    return "check that it is a mooncake_master and that it serves"


def _set_up_shared(module: ModuleType, options: MooncakeOptions) -> RawClient:
    """The pool is address space until it is used, so it may be as large as the machine."""
    raw = module.MooncakeDistributedStore()
    code = raw.setup_dummy(physical_memory_bytes(), _LOCAL_BUFFER_BYTES, options.shm_client)
    if code != 0:
        raise StoreUnavailable(
            f"the mooncake_client at {options.shm_client} refused shared memory ({code}); check that it serves"
        )
    client: RawClient = raw
    return client


def _quick_look(options: MooncakeOptions) -> Callable[[], bool]:
    """Whether everybody is there whom a call needs and whose address says so; etcd members say little of a master."""
    master = parse_store_master(options.master) if options.master else None
    needed = [parse_host_port(options.shm_client)] if options.shm_client else []
    needed += master.endpoints if master is not None and not master.discovery else ()
    return lambda: all(answers(one.host, one.port, _LOOK_S) for one in needed)
