"""Ports of this machine: hold one, see whether it is free, or say who has it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path

_LISTEN = "0A"
_CLOSING = frozenset({"04", "05", "06", "07", "09", "0B"})
"""FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, LAST_ACK, CLOSING, as the kernel writes them."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def hold_port(host: str, port: int) -> socket.socket:
    """Bind and listen, so that nobody else gets the port and tools show who has it. The caller closes it.

    Raises:
        OSError: taken, not permitted, or ``host`` is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = socket.socket(family, kind, protocol)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections of a predecessor are no holder
    try:
        held.bind(address)
        held.listen(1)
    except OSError:
        held.close()
        raise
    return held


def port_is_free(port: int) -> bool:
    """True when nobody listens on the port of any interface, where Mooncake would bind it.

    Connections that a former process left do not count: those of Mooncake's own listeners keep the port from being
    bound for a minute, even with SO_REUSEADDR; Mooncake then takes another one of its range.
    """
    try:
        hold_port("0.0.0.0", port).close()  # noqa: S104 - the question is about every interface
    except OSError:
        states = {fields[3] for fields in _sockets() if _port_of(fields) == port}
        return bool(states) and states <= _CLOSING
    return True


def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def is_unspecified(host: str) -> bool:
    """Whether ``host`` means "all interfaces" (0.0.0.0, ::): fine to bind, useless to publish."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def port_holder(port: int) -> str:
    """Who listens on ``port``: ``pid 123 (name)``, or ``another process`` where the kernel does not tell us."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _socket_inodes(process):
            return f"pid {process.name} ({_command(process)})"
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    return {f"socket:[{fields[9]}]" for fields in _sockets() if fields[3] == _LISTEN and _port_of(fields) == port}


def _sockets() -> Iterator[list[str]]:
    """Every TCP socket of this network namespace, as fields of a line of the kernel's tables."""
    for table in _TABLES:
        if table.exists():
            yield from map(str.split, table.read_text().splitlines()[1:])


def _port_of(fields: list[str]) -> int:
    return int(fields[1].rpartition(":")[2], 16)


def _socket_inodes(process: Path) -> set[str]:
    found: set[str] = set()
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                found.add(str(descriptor.readlink()))
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return found  # ended meanwhile, or another user's
    return found


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "ended"
