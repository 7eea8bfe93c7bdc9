"""Environment variables of the Mooncake client. It reads them when it is imported or set up, so they come first."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping

PORTS_PER_CLIENT = 2
"""A client binds two ports: handshake and data."""

_QUIET: Mapping[str, str] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "GLOG_logtostderr": "1"}
"""It logs a line per batch and harmless errors at level ERROR; what matters comes back as a code."""


def client_environment(
    *, call_timeout_s: float, protocol: str, rpc_ports: tuple[int, int] | None = None, cluster_id: str = ""
) -> Mapping[str, str]:
    """Variables for one client. Without the time-outs a frozen node or master costs 30 s a call.

    Args:
        call_timeout_s: after this a transfer without progress and an unanswered question count as failed.
        protocol: tcp or rdma; under tcp nothing else may be tried.
        rpc_ports: first and last of the ports the client may bind; None = Mooncake's own range.
        cluster_id: of an HA group; empty = none.
    """
    variables = {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, math.ceil(call_timeout_s))),
        "MC_RPC_TIMEOUT_MS": str(max(1, round(call_timeout_s * 1000))),
    }
    if rpc_ports is not None:
        variables["MC_MIN_RPC_PORT"], variables["MC_MAX_RPC_PORT"] = map(str, rpc_ports)
    if protocol == "tcp":
        variables["MC_FORCE_TCP"] = "1"
    if cluster_id:
        variables["MC_STORE_CLUSTER_ID"] = cluster_id
    return variables


def apply_environment(variables: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Set ``variables`` in ``environment``, and quiet logging unless the user chose a level."""
    for name, value in _QUIET.items():
        environment.setdefault(name, value)
    environment.update(variables)
