"""Move a node's objects to other nodes before it leaves, by the master's drain job over its admin HTTP port.

While a segment drains, new objects go elsewhere and reads go on. Without other nodes there is nowhere to move to.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_worker.contract import HostPort
from kvtier_worker.log import event

_LOG = logging.getLogger(__name__)

_CONCURRENCY = 256
"""Objects that move at once; the master hands out work once a second, so few at once would take for ever."""
_POLL_S = 0.5
_REQUEST_S = 5.0
_UNFINISHED = frozenset({"CREATED", "PLANNING", "RUNNING"})


class AdminError(Exception):
    """The master's admin port did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What became of it; `text` is for the log."""

    moved_objects: int
    complete: bool
    text: str


def drain_segment(
    admins: Sequence[HostPort],
    segment: str,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> DrainResult:
    """Drain ``segment`` and wait for at most ``timeout_s``."""
    try:
        admin = _leader(admins)
        others = [name for name in _request(admin, "GET", "/get_all_segments").split() if name != segment]
        if not others:
            return DrainResult(0, complete=False, text="no other storage node to move objects to; they are lost")
        body = {"segments": [segment], "target_segments": [], "max_concurrency": _CONCURRENCY}
        job = json.loads(_request(admin, "POST", "/api/v1/drain_jobs", body))["job_id"]
        deadline = clock() + timeout_s
        while True:
            answer: dict[str, Any] = json.loads(_request(admin, "GET", f"/api/v1/drain_jobs/query?job_id={job}"))
            moved, status = int(answer["succeeded_units"]), str(answer["status_name"])
            if status not in _UNFINISHED:
                return DrainResult(moved, status == "SUCCEEDED", f"{status.lower()}: {answer.get('message', '')}")
            if clock() >= deadline:
                return DrainResult(moved, complete=False, text="time is up; the rest is lost")
            event(_LOG, "moving objects to other nodes", moved=moved)
            sleep(_POLL_S)
    except (AdminError, KeyError, ValueError) as error:
        return DrainResult(0, complete=False, text=f"the master's admin port did not help ({error!r})")


def _leader(admins: Sequence[HostPort]) -> HostPort:
    problems: list[str] = []
    for admin in admins:
        try:
            if json.loads(_request(admin, "GET", "/health")).get("service_ready", True):
                return admin
            problems.append(f"{admin} is a standby")
        except (AdminError, ValueError) as error:
            problems.append(f"{admin}: {error}")
    raise AdminError("; ".join(problems) or "no address")


def _request(admin: HostPort, method: str, path: str, body: dict[str, Any] | None = None) -> str:
    connection = http.client.HTTPConnection(admin.host, admin.port, timeout=_REQUEST_S)
    try:
        payload = json.dumps(body) if body is not None else None
        connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise AdminError(f"{method} {path}: {error}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise AdminError(f"{method} {path}: {response.status} {text.strip()}")
    return text
