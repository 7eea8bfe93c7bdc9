"""Small real programs for tests of the local runtime."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from kvtier_worker.testing.processes import free_port

from kvtier_operator.local.supervisor import LocalCluster
from kvtier_operator.resources.processes import ProcessSpec, TcpProbe

_POLL_S = 0.02

SERVE = """
import signal, socket, sys, time
print("serving", flush=True)  # before anybody can find it ready
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
signal.pause()
"""
"""Python that listens on its port until it is told to stop."""


def program(name: str, source: str, *, stop_timeout_s: float = 5, start_timeout_s: float = 20) -> ProcessSpec:
    """A process that runs Python without site packages, with a free port as its argument; ready when it listens."""
    port = free_port()
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-S", "-c", source, str(port)),
        env={"KVTIER_TEST_PROGRAM": name},
        probes=(TcpProbe(port),),
        ports={port: "service"},
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


def pids(cluster: LocalCluster) -> list[int]:
    """Of what runs."""
    return [pid for pid in map(cluster.pid, cluster.names) if pid]


def eventually(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
