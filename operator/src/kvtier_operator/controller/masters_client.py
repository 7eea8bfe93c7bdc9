"""A master's admin interface over HTTP. IO; implements `masters.MasterAdmin`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from kvtier_operator.controller.masters import AdminAddress, DrainProgress, DrainUnsupported, Health, MasterSilent
from kvtier_operator.observed import DrainPhase, MasterRole

CONNECT_TIMEOUT_S = 1.0
TOTAL_TIMEOUT_S = 3.0
_CONCURRENCY = 256
"""Objects that move at once: the master hands out work once a second, so a few at once would take for ever."""
_LONGEST_ANSWER_BYTES = 4 << 20
_LONGEST_WORD = 256
"""Of what goes into annotations and statuses, which the API server would refuse if it were longer."""
_LAST_VIEW = 2**63 - 1
_LAG = re.compile(r"^ha_oplog_standby_lag(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_JOB_PHASES = {
    **dict.fromkeys(("CREATED", "PLANNING", "RUNNING"), DrainPhase.RUNNING),
    "SUCCEEDED": DrainPhase.DONE,
}
_SEGMENT_PHASES = {"DRAINING": DrainPhase.RUNNING, "DRAINED": DrainPhase.DONE}
_OF_SEGMENT = "segment:"
"""Begins a job that follows a segment, because the master's own name of it is lost; no id of the master's has it."""


class _Refused(MasterSilent):
    """The master answered that there is no such path, job or segment."""


class _NotNow(MasterSilent):
    """The master answered that the state of a job or segment does not allow it."""


@dataclass(slots=True)
class HttpMasterAdmin:
    """Admin calls of any number of masters through one session. An async context manager."""

    _session: aiohttp.ClientSession | None = field(default=None)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TOTAL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        # A master that was restarted behind the same address must not be spoken to through the old connection.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def health(self, address: AdminAddress) -> Health:
        """See `MasterAdmin.health`."""
        answer = _mapping(await self._ask("GET", address, "/health"))
        try:
            role = MasterRole(str(answer.get("role", "")))
        except ValueError:
            # A master without election names no role; it leads as soon as it serves.
            role = MasterRole.LEADER if answer.get("service_ready") and "role" not in answer else MasterRole.UNKNOWN
        return Health(
            role=role,
            serving=bool(answer.get("service_ready")) and role is MasterRole.LEADER,
            leader=str(answer.get("leader_address") or "")[:_LONGEST_WORD],
            view_version=_view_version(answer.get("view_version") or 0),
            lag=await self._lag(address) if role is MasterRole.STANDBY else None,
        )

    async def segments(self, address: AdminAddress) -> tuple[str, ...]:
        """See `MasterAdmin.segments`."""
        return tuple((await self._ask("GET", address, "/get_all_segments")).split())

    async def start_drain(self, address: AdminAddress, segment: str) -> str:
        """See `MasterAdmin.start_drain`."""
        body = {"segments": [segment], "target_segments": [], "max_concurrency": _CONCURRENCY}
        try:
            answer = _mapping(await self._ask("POST", address, "/api/v1/drain_jobs", body))
        except _Refused as error:
            raise DrainUnsupported(str(error)) from error
        except _NotNow:
            job = f"{_OF_SEGMENT}{segment}"
            if (await self.drain_progress(address, job)).phase is DrainPhase.FAILED:
                raise
            return job
        if "job_id" not in answer:
            raise DrainUnsupported(f"{address.host}:{address.port} starts no drain jobs: {answer}")
        job = str(answer["job_id"])
        if not job or len(job) > _LONGEST_WORD:
            raise MasterSilent(f"{address.host}:{address.port} names its drain job {job[:_LONGEST_WORD]!r}")
        return job

    async def drain_progress(self, address: AdminAddress, job: str) -> DrainProgress:
        """See `MasterAdmin.drain_progress`."""
        if job.startswith(_OF_SEGMENT):
            return await self._segment_progress(address, job.removeprefix(_OF_SEGMENT))
        try:
            answer = _mapping(await self._ask("GET", address, f"/api/v1/drain_jobs/query?job_id={quote(job)}"))
        except _Refused:
            return DrainProgress(DrainPhase.FAILED, "the leading master does not know the job")
        status = str(answer.get("status_name", ""))
        moved, blocked, failed = (answer.get(f"{name}_units", 0) for name in ("succeeded", "blocked", "failed"))
        detail = f"moved {moved}, blocked {blocked}, failed {failed}; {answer.get('message', '')}".rstrip("; ")
        return DrainProgress(_JOB_PHASES.get(status, DrainPhase.FAILED), detail[:_LONGEST_WORD])

    async def cancel_drain(self, address: AdminAddress, job: str) -> bool:
        """See `MasterAdmin.cancel_drain`."""
        if not job.startswith(_OF_SEGMENT):
            try:
                await self._ask("POST", address, f"/api/v1/drain_jobs/cancel?job_id={quote(job)}")
            except _Refused:
                return True  # it is not known any more
            except _NotNow:
                pass  # it has ended, or objects are on their way
            else:
                return True
        return (await self.drain_progress(address, job)).phase is DrainPhase.FAILED

    async def _segment_progress(self, address: AdminAddress, segment: str) -> DrainProgress:
        try:
            answer = _mapping(await self._ask("GET", address, f"/api/v1/segments/status?segment={quote(segment)}"))
        except _Refused:
            return DrainProgress(DrainPhase.FAILED, "the leading master does not know the segment")
        status = str(answer.get("status_name", ""))[:_LONGEST_WORD]
        return DrainProgress(_SEGMENT_PHASES.get(status, DrainPhase.FAILED), f"the segment is {status}")

    async def _lag(self, address: AdminAddress) -> int | None:
        found = _LAG.search(await self._ask("GET", address, "/metrics"))
        try:
            return None if found is None else int(float(found[1]))
        except (ValueError, OverflowError):
            return None

    async def _ask(self, method: str, address: AdminAddress, path: str, body: dict[str, Any] | None = None) -> str:
        assert self._session is not None, "the client is not open"
        url = f"http://{address.host}:{address.port}{path}"
        payload = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            # Nobody but the master itself speaks for it.
            request = self._session.request(method, url, data=payload, headers=headers, allow_redirects=False)
            async with request as response:
                text = await _text(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MasterSilent(f"{method} {url}: {error!r}") from error
        if response.status in {HTTPStatus.NOT_FOUND, HTTPStatus.BAD_REQUEST}:
            raise _Refused(f"{method} {url}: {response.status} {text.strip()[:200]}")
        if response.status == HTTPStatus.CONFLICT:
            raise _NotNow(f"{method} {url}: {response.status} {text.strip()[:200]}")
        if response.status != HTTPStatus.OK:
            raise MasterSilent(f"{method} {url}: {response.status} {text.strip()[:200]}")
        return text


async def _text(response: aiohttp.ClientResponse) -> str:
    """The body, as long as it is one that a master would send."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _LONGEST_ANSWER_BYTES:
            raise MasterSilent(f"{response.url} answers more than {_LONGEST_ANSWER_BYTES} bytes")
    return body.decode(errors="replace")


def _view_version(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _LAST_VIEW:
        raise MasterSilent(f"view_version is {str(value)[:_LONGEST_WORD]}")
    return int(value)


def _mapping(text: str) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MasterSilent(f"no JSON: {text[:200]}") from error
    if not isinstance(answer, dict):
        raise MasterSilent(f"no JSON object: {text[:200]}")
    return answer
