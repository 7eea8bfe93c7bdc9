"""Addresses as they stand in flags: ``host:port``, ``[v6]:port``, ``etcd://a:2379;b:2379``. Pure text."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PORT = 65535
DEFAULT_STORE_HOST = "127.0.0.1"
DEFAULT_STORE_BASE_PORT = 12345


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and a port; ``str`` puts an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class StoreMaster:
    """Where the store's master is found.

    Attributes:
        endpoints: one master, or the etcd members that know the leader.
        discovery: whether the endpoints are etcd's.
    """

    endpoints: tuple[HostPort, ...]
    discovery: bool

    def __str__(self) -> str:
        text = ";".join(str(endpoint) for endpoint in self.endpoints)
        return f"etcd://{text}" if self.discovery else text


def parse_host_port(text: str, *, default_port: int | None = None, minimum: int = 1) -> HostPort:
    """Read ``host:port``; without a port ``default_port`` is taken. A bare text with several colons is an IPv6 host.

    Raises:
        ValueError: it is not an address; the message says why.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 address is written [address]:port")
        port_text = rest[1:] if rest else ""
    elif text.count(":") > 1:
        host, port_text = text, ""
    else:
        host, _, port_text = text.partition(":")
    if not host or any(char.isspace() or char in "/;," for char in host):
        raise ValueError("the host is missing or malformed")
    if not port_text:
        if default_port is None:
            raise ValueError("the port is missing")
        return HostPort(host, default_port)
    if not (port_text.isascii() and port_text.isdigit()) or not minimum <= int(port_text) <= MAX_PORT:
        raise ValueError(f"the port must be a number in {minimum}..{MAX_PORT}")
    return HostPort(host, int(port_text))


def parse_store_master(text: str) -> StoreMaster:
    """Read ``--store_master_server_address``.

    Raises:
        ValueError: neither ``host:port`` nor ``etcd://host:port;host:port``; the message says why.
    """
    if not text.startswith("etcd://"):
        if "://" in text:
            raise ValueError("only etcd:// may stand in front; a plain master is host:port")
        if ";" in text or "," in text:
            raise ValueError("several endpoints need etcd:// in front")
        return StoreMaster((parse_host_port(text),), discovery=False)
    members = [member for member in text.removeprefix("etcd://").split(";") if member]
    if not members:
        raise ValueError("etcd:// needs at least one host:port")
    if any("://" in member for member in members):
        raise ValueError("the endpoints after etcd:// are host:port, without http://")
    return StoreMaster(tuple(parse_host_port(member) for member in members), discovery=True)


def store_endpoint(local_hostname: str, worker_id: int) -> HostPort:
    """Endpoint of one worker's store client: ``base_port + worker_id`` of ``--store_local_hostname``.

    Raises:
        ValueError: it is not an address, or the port is above 65535.
    """
    base = HostPort(DEFAULT_STORE_HOST, DEFAULT_STORE_BASE_PORT)
    if local_hostname:
        base = parse_host_port(local_hostname, default_port=DEFAULT_STORE_BASE_PORT)
    if base.port + worker_id > MAX_PORT:
        raise ValueError(f"port {base.port} + rank {worker_id} is above {MAX_PORT}")
    return HostPort(base.host, base.port + worker_id)
