"""Canary, drain and status of a storage node, without Mooncake."""

from __future__ import annotations

import ctypes
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_worker.contract import HostPort
from kvtier_worker.machine.memory import allocate_pages
from kvtier_worker.store_node.canary import CANARY_BYTES, Canary
from kvtier_worker.store_node.drain import DrainResult, drain_segment
from kvtier_worker.store_node.http_server import StatusServer
from kvtier_worker.store_node.status import NodeState, NodeStatus
from kvtier_worker.testing.processes import free_port


class OneObjectClient:
    """A store of its own, as much as a canary needs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.put_code = 0
        self.forgets = False
        self.puts = 0

    def batch_put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], _: Any) -> list[int]:
        self.puts += 1
        if self.put_code == 0 and not self.forgets:
            self.objects[keys[0]] = ctypes.string_at(addresses[0], sizes[0])
        return [self.put_code]

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        content = self.objects.get(keys[0])
        if content is None:
            return [-704]
        ctypes.memmove(addresses[0], content, len(content))
        return [len(content)]


@pytest.fixture
def canary() -> Iterator[tuple[Canary, OneObjectClient]]:
    pages = allocate_pages(2 * CANARY_BYTES)
    yield Canary("10.0.0.9:7000", pages.address, SimpleNamespace()), OneObjectClient()
    assert pages.nbytes


def test_a_canary_is_written_once_and_then_only_read(canary: tuple[Canary, OneObjectClient]) -> None:
    bird, client = canary

    assert [bird.look(client).is_good for _ in range(3)] == [True] * 3  # type: ignore[arg-type]
    assert client.puts == 1


def test_a_canary_that_the_master_forgot_is_written_again(canary: tuple[Canary, OneObjectClient]) -> None:
    bird, client = canary
    bird.look(client)  # type: ignore[arg-type]
    client.objects.clear()

    assert bird.look(client).is_good  # type: ignore[arg-type]
    assert client.puts == 2


@pytest.mark.parametrize(("put_code", "problem"), [(-200, "no_space"), (-900, "put"), (-800, "put")])
def test_a_canary_that_cannot_be_written_is_a_problem(
    canary: tuple[Canary, OneObjectClient], put_code: int, problem: str
) -> None:
    bird, client = canary
    client.put_code = put_code

    assert bird.look(client).problem == problem  # type: ignore[arg-type]


def test_a_canary_that_comes_back_wrong_is_a_problem(canary: tuple[Canary, OneObjectClient]) -> None:
    bird, client = canary
    bird.look(client)  # type: ignore[arg-type]
    (key,) = client.objects
    client.objects[key] = bytes(CANARY_BYTES)
    client.forgets = True

    assert bird.look(client).problem == "get"  # type: ignore[arg-type]


@contextmanager
def admin_port(answers: dict[str, list[Any]]) -> Iterator[tuple[HostPort, list[str]]]:
    """A master's admin port: the next answer for each path; the last one stays."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            length = int(self.headers.get("Content-Length") or 0)
            seen.append(f"{self.command} {path} {self.rfile.read(length).decode()}".strip())
            script = answers.get(path, [404])
            answer = script.pop(0) if len(script) > 1 else script[0]
            code = answer if isinstance(answer, int) else 200
            body = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET  # noqa: N815 - the base class names it

        def log_message(self, *args: object) -> None:
            """Quiet."""

    port = free_port()
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield HostPort("127.0.0.1", port), seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def job(status: str, moved: int) -> dict[str, Any]:
    return {"status_name": status, "succeeded_units": moved, "message": "x"}


def drain(*admins: HostPort, timeout_s: float = 10.0) -> DrainResult:
    times: list[float] = [0.0]

    def sleep(seconds: float) -> None:
        times.append(times[-1] + seconds)

    return drain_segment(admins, "me:1", timeout_s, lambda: times[-1], sleep)


SERVING: dict[str, list[Any]] = {"/health": [{"service_ready": True}], "/get_all_segments": ["me:1\nother:2\n"]}
CREATED: dict[str, list[Any]] = {"/api/v1/drain_jobs": [{"success": True, "job_id": "7"}]}


def test_a_drain_is_followed_to_its_end() -> None:
    query = [job("CREATED", 0), job("RUNNING", 3), job("SUCCEEDED", 9)]
    with admin_port({**SERVING, **CREATED, "/api/v1/drain_jobs/query": query}) as (admin, seen):
        result = drain(admin)

    assert (result.moved_objects, result.complete) == (9, True)
    assert '"segments": ["me:1"]' in seen[2]


def test_a_drain_ends_when_its_time_is_over() -> None:
    with admin_port({**SERVING, **CREATED, "/api/v1/drain_jobs/query": [job("RUNNING", 4)]}) as (admin, seen):
        result = drain(admin, timeout_s=2.0)

    assert (result.moved_objects, result.complete, result.text) == (4, False, "time is up; the rest is lost")
    assert len(seen) < 10


def test_a_lonely_node_has_nowhere_to_drain_to() -> None:
    with admin_port({**SERVING, "/get_all_segments": ["me:1\n"]}) as (admin, seen):
        assert "no other storage node" in drain(admin).text
    assert not any("drain_jobs" in line for line in seen)


def test_the_serving_master_of_several_is_asked() -> None:
    with (
        admin_port({"/health": [{"service_ready": False}]}) as (standby, standby_seen),
        admin_port({**SERVING, **CREATED, "/api/v1/drain_jobs/query": [job("SUCCEEDED", 1)]}) as (leader, _),
    ):
        assert drain(HostPort("127.0.0.1", free_port()), standby, leader).complete
    assert standby_seen == ["GET /health"]


@pytest.mark.parametrize("answer", [409, 500, "not json", {"no": "job"}])
def test_a_master_that_refuses_to_drain_costs_nothing_but_the_objects(answer: Any) -> None:
    with admin_port({**SERVING, "/api/v1/drain_jobs": [answer]}) as (admin, _):
        result = drain(admin)

    assert not result.complete
    assert "did not help" in result.text


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_follows_the_state_and_health_the_loop() -> None:
    alive, now = [True], [50.0]
    status, port = NodeStatus(1 << 30, lambda: now[0]), free_port()
    server = StatusServer("127.0.0.1", port, status, lambda: alive[0])
    try:
        assert get(port, "/ready") == (503, '{"ready": false, "state": "waiting_for_master"}')
        assert get(port, "/health")[0] == 200
        status.state = NodeState.READY
        assert get(port, "/ready")[0] == 200
        alive[0] = False
        assert get(port, "/health")[0] == 503
        assert get(port, "/nothing")[0] == 404
        now[0] = 62.5
        status.canary_failures.labels("get").inc()
        text = get(port, "/metrics")[1]
    finally:
        server.close()

    assert "kvtier_store_node_segment_bytes 1.073741824e+09" in text
    assert "kvtier_store_node_uptime_seconds 12.5" in text
    assert 'kvtier_store_node_canary_failures_total{reason="get"} 1.0' in text
    assert 'kvtier_store_node_state{kvtier_store_node_state="ready"} 1.0' in text
