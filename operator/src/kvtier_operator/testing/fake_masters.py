"""Masters without Mooncake: answers of the admin interface from memory, by call or over HTTP on loopback addresses."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from kvtier_operator.controller.masters import AdminAddress, DrainProgress, DrainUnsupported, Health, MasterSilent
from kvtier_operator.observed import DrainPhase, MasterRole

_RUNNING = "RUNNING"
_NO_SEGMENT = (HTTPStatus.NOT_FOUND, '{"success":false,"error_message":"SEGMENT_NOT_FOUND"}')
_NOT_NOW = (HTTPStatus.CONFLICT, '{"success":false,"error_message":"UNAVAILABLE_IN_CURRENT_STATUS"}')


@dataclass(slots=True)
class FakeMasters:
    """Implements `MasterAdmin` for one election: set the fields, and every master answers accordingly.

    Attributes:
        up: masters that answer.
        leader: one of them; None = none is elected.
        serving: the leader answers clients.
        mounted: segments.
        lag: of every standby.
        drains_known: the masters have drain jobs.
        progress: of drain jobs, by id.
        moving: objects are on their way, so that no job can be ended.
        calls: names of calls made, in order.
    """

    up: set[AdminAddress] = field(default_factory=set)
    leader: AdminAddress | None = None
    serving: bool = True
    mounted: tuple[str, ...] = ()
    lag: int | None = 0
    drains_known: bool = True
    progress: dict[str, DrainProgress] = field(default_factory=dict)
    moving: bool = False
    view_version: int = 1
    calls: list[str] = field(default_factory=list)
    _jobs: dict[str, str] = field(default_factory=dict)

    async def health(self, address: AdminAddress) -> Health:
        """See `MasterAdmin.health`."""
        self._answers("health", address)
        known = "" if self.leader is None else f"{self.leader.host}:{self.leader.port}"
        if address == self.leader:
            return Health(MasterRole.LEADER, self.serving, known, self.view_version)
        return Health(MasterRole.STANDBY, serving=False, leader=known, view_version=self.view_version, lag=self.lag)

    async def segments(self, address: AdminAddress) -> tuple[str, ...]:
        """See `MasterAdmin.segments`."""
        self._answers("segments", address)
        return self.mounted

    async def start_drain(self, address: AdminAddress, segment: str) -> str:
        """See `MasterAdmin.start_drain`."""
        self._answers("start_drain", address)
        if not self.drains_known or segment not in self.mounted:
            raise DrainUnsupported(segment)
        if self._progress(f"segment:{segment}").phase is not DrainPhase.FAILED:
            return f"segment:{segment}"
        job = self._jobs[segment] = f"job-{len(self.progress) + 1}"
        self.progress[job] = DrainProgress(DrainPhase.RUNNING, "moved 0")
        return job

    async def drain_progress(self, address: AdminAddress, job: str) -> DrainProgress:
        """See `MasterAdmin.drain_progress`."""
        self._answers("drain_progress", address)
        return self._progress(job)

    async def cancel_drain(self, address: AdminAddress, job: str) -> bool:
        """See `MasterAdmin.cancel_drain`."""
        self._answers("cancel_drain", address)
        if self._progress(job).phase is DrainPhase.RUNNING and job in self.progress and not self.moving:
            self.progress[job] = DrainProgress(DrainPhase.FAILED, "cancelled")
        return self._progress(job).phase is DrainPhase.FAILED

    def _progress(self, job: str) -> DrainProgress:
        job = self._jobs.get(job.removeprefix("segment:"), job)
        return self.progress.get(job, DrainProgress(DrainPhase.FAILED, "unknown job"))

    def _answers(self, call: str, address: AdminAddress) -> None:
        self.calls.append(call)
        if address not in self.up:
            raise MasterSilent(f"{address.host}:{address.port} is down")


class MasterServers:
    """Tiny HTTP servers that answer as Mooncake's masters do, each on a loopback address of its own.

    A context manager. Fields may be set at any time.

    Attributes:
        leader: host of the leader; empty = none is elected.
        segments: that it lists.
        drains_known: it has drain jobs.
        job_status: of every drain job.
        moving: objects are on their way, so that no job can be ended.
        jobs: ids of those that were started.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._servers: dict[str, ThreadingHTTPServer] = {}
        self.leader = ""
        self.segments: tuple[str, ...] = ()
        self.drains_known = True
        self.job_status = _RUNNING
        self.moving = False
        self.jobs: list[str] = []
        self._drained: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._servers):
            self.stop(host)

    def start(self, host: str) -> None:
        """Serve on an address."""
        masters = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(*masters.answer("GET", host, self.path, {}))

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                self._reply(*masters.answer("POST", host, self.path, body))

            def _reply(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer((host, self._port), Handler)
        server.daemon_threads = True
        self._servers[host] = server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self, host: str) -> None:
        """Answer on this address no more."""
        server = self._servers.pop(host)
        server.shutdown()
        server.server_close()

    def answer(self, method: str, host: str, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of one request."""
        url = urlsplit(path)
        leads = host == self.leader
        if url.path == "/health":
            return HTTPStatus.OK, json.dumps(
                {
                    "status": "ok",
                    "role": "leader" if leads else "standby",
                    "ha_state": "serving" if leads else "standby",
                    "service_ready": leads,
                    "leader_address": self.leader or None,
                    "view_version": 1,
                }
            )
        if url.path == "/metrics":
            return HTTPStatus.OK, "# TYPE ha_oplog_standby_lag gauge\nha_oplog_standby_lag 0\n"
        if not leads:
            return HTTPStatus.SERVICE_UNAVAILABLE, '{"success":false,"error":"service plane is not active"}'
        if url.path == "/get_all_segments":
            return HTTPStatus.OK, "\n".join(self.segments)
        if self.drains_known and url.path.startswith("/api/v1/"):
            return self._drain(method, url.path, dict(parse_qsl(url.query)), body)
        return HTTPStatus.NOT_FOUND, "404 Not Found"

    def _drain(self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> tuple[int, str]:
        if path.endswith("/segments/status"):
            return self._segment_status(query["segment"])
        if method == "POST" and path.endswith("/drain_jobs"):
            return self._start(body["segments"])
        if (job := query["job_id"]) not in self.jobs:
            return HTTPStatus.NOT_FOUND, '{"success":false,"error_message":"JOB_NOT_FOUND"}'
        if path.endswith("/cancel"):
            if self.moving or self.job_status != _RUNNING:
                return _NOT_NOW
            self.job_status = "CANCELED"
        answer = {"job_id": job, "status_name": self.job_status, "succeeded_units": 3, "message": "as told"}
        return HTTPStatus.OK, json.dumps(answer)

    def _start(self, segments: Sequence[str]) -> tuple[int, str]:
        if set(segments) - set(self.segments):
            return _NO_SEGMENT
        if not self._takes_objects(segments[0]):
            return _NOT_NOW
        self._drained.update(segments)
        self.job_status = _RUNNING
        self.jobs.append(f"{len(self.jobs) + 1}-7")
        return HTTPStatus.OK, json.dumps({"success": True, "job_id": self.jobs[-1], "status": "CREATED"})

    def _segment_status(self, segment: str) -> tuple[int, str]:
        if segment not in self.segments:
            return _NO_SEGMENT
        drained = "DRAINING" if self.job_status == _RUNNING else "DRAINED"
        status = "OK" if self._takes_objects(segment) else drained
        return HTTPStatus.OK, json.dumps({"success": True, "segment": segment, "status_name": status})

    def _takes_objects(self, segment: str) -> bool:
        return segment not in self._drained or self.job_status in {"CANCELED", "FAILED"}
