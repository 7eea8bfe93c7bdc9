"""Asks a process whether it is ready, and the machine whether a port is free. IO; called by the supervisor."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from kvtier_operator.resources.processes import AnyProbe, HttpProbe, Probe, ProcessSpec

PROBE_TIMEOUT_S = 2.0

_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_CLOSING = frozenset({"04", "05", "06", "07", "09", "0B"})
"""FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE, LAST_ACK, CLOSING, as the kernel writes them there."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an HTTP server answered; ``status`` 0 = nothing."""

    status: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        """200."""
        return self.status == HTTPStatus.OK

    @property
    def facts(self) -> Mapping[str, object]:
        """Its JSON object; empty when it is none."""
        try:
            body = json.loads(self.text)
        except ValueError:
            return {}
        return body if isinstance(body, Mapping) else {}


def get(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> Reply:
    """GET without proxies and redirects."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}" if parts.query else parts.path)
        response = connection.getresponse()
        return Reply(response.status, response.read().decode(errors="replace"))
    except (OSError, HTTPException):
        return Reply()
    finally:
        connection.close()


def waiting_for(probe: Probe) -> str:
    """What the process is still doing, in its own words where it says so; empty when it is ready."""
    if isinstance(probe, AnyProbe):
        return "" if any(not waiting_for(one) for one in probe.probes) else f"waiting for {probe.wanted}"
    if isinstance(probe, HttpProbe):
        return _waiting_for_http(probe)
    try:
        socket.create_connection((probe.host, probe.port), timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return f"waiting for port {probe.port} to open"
    return ""


def _waiting_for_http(probe: HttpProbe) -> str:
    reply = get(probe.url)
    if not reply.status:
        return f"waiting for {probe.url} to answer"
    facts = reply.facts
    if reply.ok and all(facts.get(name) == value for name, value in probe.expect.items()):
        return ""
    return str(facts.get("reason") or f"waiting for {probe.url} to say that it is ready")


def busy_ports(processes: Sequence[ProcessSpec], owners: Mapping[int, str]) -> list[str]:
    """One sentence for every port of the processes that somebody else holds.

    Args:
        processes: that want their ports.
        owners: who has a port, whether it listens there at this moment or not: a master that stands by does not.
    """
    return [
        f"port {port} ({process.name}, {purpose}) is in use{_by(owners.get(port))}: "
        f"stop what holds it, or move {_where(purpose)}"
        for process in processes
        for port, purpose in process.ports.items()
        if port in owners or not port_is_free(port)
    ]


def _by(owner: str | None) -> str:
    return f" by {owner}" if owner else ""


def _where(purpose: str) -> str:
    return "spec.roles[].port" if purpose == "HTTP API" else "spec.transport.ports.range"


def port_is_free(port: int) -> bool:
    """True when nobody listens on the port of any interface, where Mooncake would bind it.

    Connections that a former run left behind do not count. Those of Mooncake's own listeners keep the port from being
    bound for a minute, even with SO_REUSEADDR; Mooncake then takes another one of its range.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError:
            return _only_old_connections(port)
    return True


def _only_old_connections(port: int) -> bool:
    states = {
        fields[3]
        for table in _SOCKET_TABLES
        if table.exists()
        for fields in map(str.split, table.read_text().splitlines()[1:])
        if int(fields[1].rpartition(":")[2], 16) == port
    }
    return bool(states) and states <= _CLOSING
