"""Real Mooncake processes on this machine for tests and benches: master, storage client, `kvtier store`.

Each is a context manager that yields when the process serves and stops it on the way out:

    with running_master() as master, running_mooncake_client(master.address) as client:
        options = MooncakeOptions(master=master.address, …)                       # over TCP
        options = MooncakeOptions(master=master.address, shm_client=client.rpc_address, …)  # shared memory

`child.kill()` and `child.start()` + `wait_serving()` simulate a crash and a restart on the same ports.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier_worker.testing.processes import ChildProcess, free_ports, http_status, port_answers

_QUIET: Mapping[str, str] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "1", "GLOG_logtostderr": "1"}
_LOOPBACK = "127.0.0.1"


def binary(name: str) -> str:
    """Path of a program of this Python environment, or of PATH.

    Raises:
        FileNotFoundError: neither has it; names the package that brings it.
    """
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which(name)
    if not found:
        raise FileNotFoundError(f"{name} is not installed: pip install mooncake-transfer-engine-non-cuda")
    return found


@dataclass(slots=True)
class RunningMaster(ChildProcess):
    """A mooncake_master without HA."""

    rpc_port: int = 0
    metrics_port: int = 0

    @property
    def address(self) -> str:
        """host:port for clients."""
        return f"{_LOOPBACK}:{self.rpc_port}"

    def wait_serving(self, timeout_s: float = 15.0) -> None:
        """Wait until it accepts clients."""
        self.wait_until(lambda: port_answers(self.rpc_port), timeout_s)


@dataclass(slots=True)
class RunningMooncakeClient(ChildProcess):
    """The wheel's own storage process; serves same-machine engines by shared memory on `rpc_address`."""

    rpc_port: int = 0
    host: str = ""

    @property
    def rpc_address(self) -> str:
        """host:port for ``--store_shm_client``."""
        return f"{_LOOPBACK}:{self.rpc_port}"

    def wait_serving(self, timeout_s: float = 20.0) -> None:
        """Wait until it accepts same-machine engines; its segment is mounted then."""
        self.wait_until(lambda: port_answers(self.rpc_port), timeout_s)


@dataclass(slots=True)
class RunningStoreNode(ChildProcess):
    """A `kvtier store`."""

    http_port: int = 0
    shm_port: int = 0

    @property
    def shm_address(self) -> str:
        """host:port for ``--store_shm_client``; only with ``shm=True``."""
        return f"{_LOOPBACK}:{self.shm_port}"

    def wait_serving(self, timeout_s: float = 30.0) -> None:
        """Wait until its /ready says 200."""
        self.wait_until(lambda: http_status(self.http_port, "/ready") == 200, timeout_s)  # noqa: PLR2004


@contextmanager
def running_master(
    *, client_ttl_s: int = 3, lease_ttl_ms: int = 10000, extra: Sequence[str] = ()
) -> Iterator[RunningMaster]:
    """A mooncake_master on free ports.

    Args:
        client_ttl_s: seconds after which a silent client's segment is dropped.
        lease_ttl_ms: how long a probe or a read protects an object from eviction.
        extra: further flags.
    """
    rpc_port, metrics_port = free_ports(2)
    argv = (
        binary("mooncake_master"),
        f"--rpc_address={_LOOPBACK}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={_LOOPBACK}",
        f"--metrics_port={metrics_port}",
        f"--client_ttl={client_ttl_s}",
        f"--default_kv_lease_ttl={lease_ttl_ms}",
        "--logtostderr",
        *extra,
    )
    child = RunningMaster("mooncake_master", argv, _QUIET, rpc_port=rpc_port, metrics_port=metrics_port)
    try:
        child.start()
        child.wait_serving()
        yield child
    finally:
        child.stop()


@contextmanager
def running_mooncake_client(
    master: str, *, segment: str = "256MB", environment: Mapping[str, str] | None = None, extra: Sequence[str] = ()
) -> Iterator[RunningMooncakeClient]:
    """A mooncake_client with a segment of ``segment`` on free ports, mounted at ``master``."""
    label_port, rpc_port = free_ports(2)
    host = f"{_LOOPBACK}:{label_port}"
    argv = (
        binary("mooncake_client"),
        f"--host={host}",
        f"--port={rpc_port}",
        f"--global_segment_size={segment}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        "--logtostderr",
        *extra,
    )
    settings = {**_QUIET, "MC_FORCE_TCP": "1", **(environment or {})}
    child = RunningMooncakeClient("mooncake_client", argv, settings, rpc_port=rpc_port, host=host)
    try:
        child.start()
        child.wait_serving()
        yield child
    finally:
        child.stop()


@contextmanager
def running_store_node(
    master: str,
    *,
    segment: str = "256MB",
    shm: bool = False,
    environment: Mapping[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Iterator[RunningStoreNode]:
    """A `kvtier store` with a segment of ``segment`` on free ports, ready."""
    label_port, http_port, shm_port = free_ports(3)
    argv = (
        sys.executable,
        "-m",
        "kvtier_worker.store_node.main",
        f"--host={_LOOPBACK}:{label_port}",
        f"--http_port={http_port}",
        f"--global_segment_size={segment}",
        f"--master_server_address={master}",
        *((f"--shm_port={shm_port}",) if shm else ()),
        *extra,
    )
    settings = {**_QUIET, **(environment or {})}
    child = RunningStoreNode("kvtier store", argv, settings, http_port=http_port, shm_port=shm_port if shm else 0)
    try:
        child.start()
        child.wait_serving()
        yield child
    finally:
        child.stop(20.0)


@dataclass(slots=True)
class RunningEtcd(ChildProcess):
    """One etcd member with its data in a temporary folder."""

    client_port: int = 0

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"{_LOOPBACK}:{self.client_port}"


@contextmanager
def running_etcd() -> Iterator[RunningEtcd]:
    """An etcd on free ports.

    Raises:
        FileNotFoundError: etcd is not installed.
    """
    program = shutil.which("etcd")
    if program is None:
        raise FileNotFoundError("etcd is not installed: apt-get install -y etcd-server")
    client_port, peer_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="kvtier-etcd-") as folder:
        argv = (
            program,
            f"--data-dir={folder}/data",
            f"--listen-client-urls=http://{_LOOPBACK}:{client_port}",
            f"--advertise-client-urls=http://{_LOOPBACK}:{client_port}",
            f"--listen-peer-urls=http://{_LOOPBACK}:{peer_port}",
            f"--initial-advertise-peer-urls=http://{_LOOPBACK}:{peer_port}",
            f"--initial-cluster=default=http://{_LOOPBACK}:{peer_port}",
        )
        child = RunningEtcd("etcd", argv, client_port=client_port)
        try:
            child.start()
            child.wait_until(lambda: http_status(client_port, "/health") == 200, 15.0)  # noqa: PLR2004
            yield child
        finally:
            child.stop()


@contextmanager
def running_ha_master(etcd: str, cluster_id: str, *, client_ttl_s: int = 3) -> Iterator[RunningMaster]:
    """A mooncake_master of an HA group that keeps its objects over a failover. Yields when its admin port answers.

    Args:
        etcd: host:port of etcd.
        cluster_id: of the group; clients need it as MC_STORE_CLUSTER_ID.
        client_ttl_s: seconds after which a silent client's segment is dropped.
    """
    rpc_port, metrics_port = free_ports(2)
    argv = (
        binary("mooncake_master"),
        f"--rpc_address={_LOOPBACK}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={_LOOPBACK}",
        f"--metrics_port={metrics_port}",
        f"--client_ttl={client_ttl_s}",
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        f"--ha_backend_connstring={etcd}",
        f"--cluster_id={cluster_id}",
        "--enable_oplog=true",
        "--logtostderr",
    )
    child = RunningMaster("mooncake_master", argv, _QUIET, rpc_port=rpc_port, metrics_port=metrics_port)
    try:
        child.start()
        child.wait_until(lambda: http_status(metrics_port, "/health") == 200, 15.0)  # noqa: PLR2004
        yield child
    finally:
        child.stop()
