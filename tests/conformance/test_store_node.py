"""`kvtier store` as a process: serves, tells its health, leaves gracefully, moves its objects first."""

from __future__ import annotations

import http.client
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtier_worker.adapters.mooncake_store import MooncakeStore
from kvtier_worker.testing.mooncake import RunningMaster, running_master, running_mooncake_client, running_store_node
from kvtier_worker.testing.processes import ChildProcess, free_port, free_ports, http_status, port_answers
from kvtier_worker.testing.store_worlds import Arena, content_of, gets, mooncake_options, puts, read, unique

pytestmark = [pytest.mark.mooncake, pytest.mark.slow, pytest.mark.timeout(90)]


def body(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def segments(master: RunningMaster) -> list[str]:
    return body(master.metrics_port, "/get_all_segments").split()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def test_a_node_serves_and_unmounts_when_asked_to_stop() -> None:
    with running_master(client_ttl_s=60) as master, running_store_node(master.address) as node:
        store = MooncakeStore.connect(mooncake_options(master.address))
        arena = Arena(store)
        key = unique("node")
        target = arena.buffer(key, b"k" * 9000)
        assert puts(store, [target]) == ["stored"]
        assert gets(store, [target]) == ["hit"]
        assert http_status(node.http_port, "/health") == 200
        assert "kvtier_store_node_segment_bytes 2.68435456e+08" in body(node.http_port, "/metrics")

        assert node.stop(20.0) == 0
        assert segments(master) == []
        assert list(store.exists([key])) == [False]
        store.close()


def test_engines_of_the_same_machine_share_memory_with_a_node() -> None:
    with running_master() as master, running_store_node(master.address, shm=True) as node:
        store = MooncakeStore.connect(mooncake_options(master.address, shm_client=node.shm_address))
        arena = Arena(store)
        key = unique("shared")
        source, target = arena.buffer(key, content_of(key, 300_000)), arena.buffer(key, nbytes=300_000)

        assert puts(store, [source]) == ["stored"]
        assert gets(store, [target]) == ["hit"]
        assert read(target) == content_of(key, 300_000)
        assert node.stop(20.0) == 0
        wait_for(lambda: segments(master) == [])
        store.close()


def test_a_killed_node_leaves_no_mooncake_client_behind() -> None:
    with running_master() as master, running_store_node(master.address, shm=True) as node:
        assert http_status(node.http_port, "/ready") == 200
        store_port = node.shm_port
        node.kill()
        wait_for(lambda: not port_answers(store_port))


@pytest.mark.parametrize("shm", [False, True], ids=["embedded", "shm"])
def test_objects_move_to_another_node_before_a_node_leaves(*, shm: bool) -> None:
    with running_master() as master:
        admin = f"--master_admin_address=127.0.0.1:{master.metrics_port}"
        with running_store_node(master.address, shm=shm, extra=(admin,)) as leaving:
            store = MooncakeStore.connect(mooncake_options(master.address))
            arena = Arena(store)
            keys = [unique("move") for _ in range(12)]
            puts(store, [arena.buffer(key, content_of(key, 10_000)) for key in keys])
            with running_mooncake_client(master.address):
                assert leaving.stop(45.0) == 0, leaving.log_tail()
                buffers = [arena.buffer(key, nbytes=10_000) for key in keys]

                assert gets(store, buffers) == ["hit"] * 12, leaving.log_tail()
                assert [read(buffer) for buffer in buffers] == [content_of(key, 10_000) for key in keys]
                store.close()


def test_a_node_is_not_ready_while_the_master_is_gone_and_ready_again_after() -> None:
    with running_master() as master, running_store_node(master.address, extra=("--canary_interval=200",)) as node:
        master.kill()
        wait_for(lambda: http_status(node.http_port, "/ready", timeout_s=10) == 503)
        assert http_status(node.http_port, "/health", timeout_s=10) == 200
        master.start()
        wait_for(lambda: http_status(node.http_port, "/ready", timeout_s=10) == 200, 40.0)
        assert segments(master) != []


def node_argv(master: str, *extra: str) -> tuple[ChildProcess, int]:
    label, http_port = free_ports(2)
    argv = (
        sys.executable,
        "-m",
        "kvtier_worker.store_node.main",
        f"--host=127.0.0.1:{label}",
        f"--http_port={http_port}",
        "--global_segment_size=32MB",
        f"--master_server_address={master}",
        *extra,
    )
    return ChildProcess("kvtier store", argv), http_port


def test_a_node_waits_for_its_master() -> None:
    with running_master() as master:
        master.kill()
        node, http_port = node_argv(master.address)
        node.start()
        try:
            node.wait_until(lambda: http_status(http_port, "/health") == 200, 30.0)
            assert http_status(http_port, "/ready") == 503
            node.wait_until(lambda: "waiting for the master" in node.log_tail(), 10.0)
            master.start()
            node.wait_until(lambda: http_status(http_port, "/ready") == 200, 20.0)
        finally:
            assert node.stop(20.0) == 0


def test_a_node_without_master_gives_up_and_says_why() -> None:
    address = f"127.0.0.1:{free_port()}"
    node, _ = node_argv(address, "--master_wait=300")
    node.start()
    assert node.process is not None

    assert node.process.wait(20) == 1
    assert f"nobody answers at {address}" in node.log_tail()


def test_a_node_that_is_told_to_stop_while_it_waits_stops() -> None:
    node, http_port = node_argv(f"127.0.0.1:{free_port()}")
    node.start()
    node.wait_until(lambda: http_status(http_port, "/health") == 200, 30.0)
    node.signal(signal.SIGTERM)
    assert node.process is not None
    assert node.process.wait(10) == 0


def test_two_nodes_cannot_have_one_address() -> None:
    with running_master() as master, running_store_node(master.address) as node:
        host = next(word for word in node.argv if word.startswith("--host="))
        second, _ = node_argv(master.address, host)
        second.start()
        assert second.process is not None

        assert second.process.wait(20) == 1
        assert f"held by pid {node.pid}" in second.log_tail()


def test_a_node_whose_mooncake_client_dies_says_so_and_ends() -> None:
    with (
        running_master() as master,
        running_store_node(master.address, shm=True, extra=("--canary_interval=200",)) as node,
    ):
        assert node.process is not None
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert node.process.wait(20) == 1
        assert "the mooncake_client ended with code -9" in node.log_tail()
