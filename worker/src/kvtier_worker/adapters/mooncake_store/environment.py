"""Environment variables of the Mooncake client. It reads them when it is imported or set up, so they come first."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping

from kvtier_worker.adapters.mooncake_store.options import MooncakeOptions

_LOG = logging.getLogger(__name__)

_QUIET: Mapping[str, str] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "GLOG_logtostderr": "1"}
"""It logs a line per batch and harmless errors at level ERROR; what matters comes back as a code."""


def client_environment(options: MooncakeOptions) -> Mapping[str, str]:
    """Variables that follow from the options. Without the time-outs a frozen node or master costs 30 s a call."""
    variables = {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, math.ceil(options.call_timeout_s))),
        "MC_RPC_TIMEOUT_MS": str(max(1, round(options.call_timeout_s * 1000))),
    }
    if options.rpc_ports is not None:
        variables["MC_MIN_RPC_PORT"], variables["MC_MAX_RPC_PORT"] = map(str, options.rpc_ports)
    if options.protocol == "tcp":
        variables["MC_FORCE_TCP"] = "1"
    if options.cluster_id:
        variables["MC_STORE_CLUSTER_ID"] = options.cluster_id
    return variables


def apply_environment(options: MooncakeOptions, environment: MutableMapping[str, str]) -> None:
    """Set them for this process. Log settings that the user made stay."""
    for name, value in _QUIET.items():
        environment.setdefault(name, value)
    if environment.get("DEVICE_NAMES"):
        _LOG.info("DEVICE_NAMES is ignored; name devices with --store_rdma_devices")
    environment.update(client_environment(options))
