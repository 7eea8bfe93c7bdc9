"""Flags of ``kvtier store``: parsed, checked, all violations at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_worker.contract import (
    FlagGroup,
    HostPort,
    StoreMaster,
    flag,
    flags_of,
    parse_flags,
    parse_host_port,
    parse_store_master,
)
from kvtier_worker.errors import ConfigError
from kvtier_worker.machine.memory import physical_memory_bytes
from kvtier_worker.machine.ports import is_unspecified
from kvtier_worker.machine.rdma import SYSFS, rdma_ports, rdma_violations

MIN_SEGMENT_BYTES = 16 << 20
"""Mooncake refuses smaller ones."""

_SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) *(?P<unit>[KMGT]?)I?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of ``4GB``, ``512MiB``, ``1.5 TB`` or ``1073741824``; units are powers of 1024 as in Mooncake.

    Raises:
        ValueError: not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("write a number and B, KB, MB, GB or TB")
    return int(float(match["number"]) * _UNITS[match["unit"].upper()])


@dataclass(frozen=True, slots=True)
class StoreNodeSettings:
    """Settings of one storage node. Field names are the flags' names."""

    host: str = flag(
        "", FlagGroup.STORE, "ip:port that this node publishes: an address that engines reach, a port of its own."
    )
    global_segment_size: str = flag("4GB", FlagGroup.STORE, "Memory that this node gives to the store.")
    master_server_address: str = flag(
        "", FlagGroup.STORE, "host:port of the mooncake_master, or etcd://a:2379;b:2379 for leader discovery."
    )
    metadata_server: str = flag("P2PHANDSHAKE", FlagGroup.STORE, "Transfer Engine metadata.")
    protocol: str = flag("tcp", FlagGroup.STORE, "Transport; rdma needs a device.", choices=("tcp", "rdma"))
    rdma_devices: str = flag("", FlagGroup.STORE, "RDMA devices, comma separated; empty = all active ones.")
    shm_port: int = flag(
        0,
        FlagGroup.STORE,
        "Port for engines on this machine (--store_shm_client); they then share memory with this node. 0 = off.",
        minimum=0,
        maximum=65535,
    )
    master_admin_address: str = flag(
        "",
        FlagGroup.STORE,
        "host:port of the master's metrics port (several: a;b;c). When this node stops, its objects then move to "
        "other nodes first. Empty = they are lost.",
    )
    master_wait: int = flag(
        60000, FlagGroup.STORE, "Milliseconds to wait for the master at start.", minimum=0, maximum=2**31
    )
    drain_timeout: int = flag(
        30000, FlagGroup.STORE, "Milliseconds that moving objects away may take at the end.", minimum=0, maximum=2**31
    )
    canary_interval: int = flag(
        5000, FlagGroup.STORE, "Milliseconds between two test reads of this node.", minimum=100, maximum=2**31
    )
    call_timeout: int = flag(
        3000, FlagGroup.STORE, "Milliseconds after which a call counts as failed.", minimum=1000, maximum=2**31
    )
    http_host: str = flag("", FlagGroup.SERVER, "Address of /health, /ready and /metrics; empty = the one of --host.")
    http_port: int = flag(9300, FlagGroup.SERVER, "Port of /health, /ready and /metrics.", minimum=1, maximum=65535)

    @property
    def endpoint(self) -> HostPort:
        """`host`, parsed; it was checked before."""
        return parse_host_port(self.host)

    @property
    def segment_bytes(self) -> int:
        """`global_segment_size` in bytes."""
        return parse_size(self.global_segment_size)

    @property
    def master(self) -> StoreMaster:
        """`master_server_address`, parsed."""
        return parse_store_master(self.master_server_address)

    @property
    def admins(self) -> tuple[HostPort, ...]:
        """`master_admin_address`, parsed; empty when there is none."""
        return tuple(parse_host_port(one) for one in self.master_admin_address.split(";") if one)


def read_settings(argv: Sequence[str], environment: Mapping[str, str], sysfs: Path = SYSFS) -> StoreNodeSettings:
    """Settings from the command line.

    Raises:
        ConfigError: with every violation.
    """
    parsed = parse_flags(StoreNodeSettings, argv, environment)
    violations = [problem for _, problem in parsed.errors]
    broken = {name for name, _ in parsed.errors}
    violations += [
        f"--{name}={getattr(parsed.settings, name)}: {problem}"
        for name, problem in _violations(parsed.settings, environment, sysfs)
        if name not in broken
    ]
    if violations:
        raise ConfigError(violations)
    return parsed.settings


def _violations(settings: StoreNodeSettings, environment: Mapping[str, str], sysfs: Path) -> Iterator[tuple[str, str]]:
    yield from _ranges(settings)
    yield from _host(settings)
    yield from _segment(settings)
    yield from _master(settings, environment)
    if settings.protocol == "rdma":
        for problem in rdma_violations(settings.rdma_devices, rdma_ports(sysfs)):
            yield "protocol", problem
    ports = [settings.http_port, *([settings.shm_port] if settings.shm_port else [])]
    if len(set(ports)) != len(ports):
        yield "shm_port", "is also --http_port; choose another one"


def _ranges(settings: StoreNodeSettings) -> Iterator[tuple[str, str]]:
    for name, entry in flags_of(StoreNodeSettings).items():
        value = getattr(settings, name)
        if isinstance(value, int) and not entry.minimum <= value <= entry.maximum:
            yield name, f"must be {entry.range_text}"


def _host(settings: StoreNodeSettings) -> Iterator[tuple[str, str]]:
    try:
        endpoint = settings.endpoint
    except ValueError as error:
        yield "host", f"{error}; use ip:port of this machine, as engines reach it"
        return
    if is_unspecified(endpoint.host):
        yield "host", f"engines would dial themselves at {endpoint.host}; use the address of this machine or pod"
    if endpoint.port in (settings.http_port, settings.shm_port):
        yield "host", f"port {endpoint.port} is also --http_port or --shm_port; choose another one"


def _segment(settings: StoreNodeSettings) -> Iterator[tuple[str, str]]:
    try:
        nbytes = settings.segment_bytes
    except ValueError as error:
        yield "global_segment_size", str(error)
        return
    if nbytes < MIN_SEGMENT_BYTES:
        yield "global_segment_size", f"{nbytes} bytes; the smallest segment is {MIN_SEGMENT_BYTES >> 20}MB"
    elif nbytes > (memory := physical_memory_bytes()):
        yield "global_segment_size", f"{nbytes} bytes, and this machine has {memory}; give it less"


def _master(settings: StoreNodeSettings, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    try:
        master = settings.master
    except ValueError as error:
        yield "master_server_address", f"{error}; use host:port, or etcd://host:2379;host:2379"
    else:
        if master.discovery and not environment.get("MC_STORE_CLUSTER_ID"):
            yield "master_server_address", "needs MC_STORE_CLUSTER_ID; set it to the masters' --cluster_id"
    try:
        settings.admins  # noqa: B018 - reading it is the check
    except ValueError as error:
        yield "master_admin_address", f"{error}; use host:metrics_port of the master"
