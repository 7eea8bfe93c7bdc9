"""Network addresses as our flags write them: ``host:port``, ``[v6]:port``, ``etcd://a:2379;b:2379``.

Pure; used by whoever parses, checks or derives an address. A bad address is a `ValueError` whose text names it.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_STORE_PORT = 12345
"""Base port of the store clients when ``--store_local_hostname`` names none."""

MAX_PORT = 65535
_ETCD = "etcd://"
_UNSPECIFIED = frozenset({"0.0.0.0", "::", "*", ""})  # noqa: S104 - addresses to refuse, not to bind


@dataclass(frozen=True, slots=True)
class HostPort:
    """One endpoint. ``str()`` gives the form that `parse_host_port` reads."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unspecified(self) -> bool:
        """Whether the host means "all interfaces": fine to bind, useless to publish."""
        return self.host in _UNSPECIFIED


def parse_host_port(text: str, default_port: int | None = None) -> HostPort:
    """Read ``host:port``, ``[v6]:port``, and without a port ``host`` or a bare IPv6 address.

    Raises:
        ValueError: no host, no port and no default, or a port outside 1…65535.
    """
    host, port_text = _split(text.strip())
    if not host:
        raise ValueError(f"{text!r} has no host; write host:port")
    if not port_text:
        if default_port is None:
            raise ValueError(f"{text!r} has no port; write host:port")
        return HostPort(host, default_port)
    if not port_text.isdecimal() or not 1 <= int(port_text) <= MAX_PORT:
        raise ValueError(f"{text!r} has port {port_text!r}; a port is a number from 1 to {MAX_PORT}")
    return HostPort(host, int(port_text))


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is no address; write an IPv6 address as [address]:port")
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""
    host, _, port_text = text.partition(":")
    return host, port_text


def store_local_address(base: str, rank: int) -> HostPort:
    """Label of rank ``rank``'s store client: the host of ``--store_local_hostname`` and its port + rank.

    Empty base = 127.0.0.1, no port = `DEFAULT_STORE_PORT`. ``rank`` is the global rank.

    Raises:
        ValueError: not an address, or port + rank is above 65535.
    """
    address = parse_host_port(base or "127.0.0.1", DEFAULT_STORE_PORT)
    port = address.port + rank
    if port > MAX_PORT:
        raise ValueError(f"{base!r}: port {address.port} + rank {rank} is above {MAX_PORT}; choose a lower base port")
    return HostPort(address.host, port)


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Where clients find the master: directly, or by asking etcd for the leader.

    Attributes:
        endpoints: the master itself, or the members of etcd.
        via_etcd: which of the two.
    """

    endpoints: tuple[HostPort, ...]
    via_etcd: bool


def parse_master_address(text: str) -> MasterAddress:
    """Read ``host:port`` or ``etcd://a:2379;b:2379`` (commas and ``http://`` inside are accepted too).

    Raises:
        ValueError: empty, or one of the addresses is none.
    """
    if not text.startswith(_ETCD):
        return MasterAddress((parse_host_port(text),), via_etcd=False)
    members = [one for one in text.removeprefix(_ETCD).replace(",", ";").split(";") if one]
    if not members:
        raise ValueError(f"{text!r} names no etcd member; write etcd://host:2379;host:2379")
    return MasterAddress(tuple(parse_host_port(one.removeprefix("http://"), 2379) for one in members), via_etcd=True)
