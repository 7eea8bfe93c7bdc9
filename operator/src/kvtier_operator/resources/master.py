"""The Mooncake master as a process. Pure."""

from __future__ import annotations

from kvtier_operator.api import Master
from kvtier_operator.planning.ports import PortBlock
from kvtier_operator.resources.processes import LOOPBACK, HttpProbe, ProcessSpec, Programs, TcpProbe

MASTER_PORTS = 2


def master_name(index: int) -> str:
    """Name of a master."""
    return f"master-{index}"


def master_address(ports: PortBlock) -> str:
    """host:port that clients dial."""
    return f"{LOOPBACK}:{ports.port(0)}"


def master_process(index: int, master: Master, ports: PortBlock, programs: Programs) -> ProcessSpec:
    """A master without high availability: it serves as soon as it runs."""
    rpc, admin = ports.port(0), ports.port(1)
    return ProcessSpec(
        name=master_name(index),
        argv=(
            *programs.mooncake_master,
            f"--rpc_address={LOOPBACK}",
            f"--rpc_port={rpc}",
            f"--metrics_host={LOOPBACK}",
            f"--metrics_port={admin}",
            f"--default_kv_lease_ttl={master.lease_ttl_ms}",
            f"--client_ttl={master.client_ttl_ms // 1000}",
            "--logtostderr",
        ),
        env={"GLOG_minloglevel": "1"},
        # /health answers 200 before it serves; service_ready in its body is the truth.
        probes=(HttpProbe(f"http://{LOOPBACK}:{admin}/health", {"service_ready": True}), TcpProbe(rpc)),
        ports={rpc: "RPC", admin: "admin and metrics"},
        start_timeout_s=30,
        stop_timeout_s=5,
    )
