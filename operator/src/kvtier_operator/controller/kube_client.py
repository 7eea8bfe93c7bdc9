"""The Kubernetes API over HTTP, with the credentials that kopf uses. IO; implements `cluster.Cluster`.

Nothing is repeated here: the queue knows when to try again, and a request that may have been carried out must be
planned anew. The one exception are expired credentials, which are read again once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from kopf import ConnectionInfo

from kvtier_operator.cluster import Listed
from kvtier_operator.errors import (
    ApiConflict,
    ApiDenied,
    ApiError,
    ApiInvalid,
    ApiNotFound,
    ApiUnavailable,
    NamespaceEnding,
)
from kvtier_operator.kinds import KINDS, Kind
from kvtier_operator.labels import MANAGER, STATUS_MANAGER
from kvtier_operator.observed import Manifest

REQUEST_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 20
_PAGE = 500
_LONGEST_MESSAGE = 500

_APPLY = "application/apply-patch+yaml"
"""JSON is YAML."""
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_BY_US = {"fieldManager": MANAGER}
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_Shape = TypeVar("_Shape")

Login = Callable[[], ConnectionInfo]


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    continue_: str = msgspec.field(default="", name="continue")


class _Item(msgspec.Struct):
    metadata: _Metadata


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[_Item] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request, for whoever counts them.

    Attributes:
        verb: as in RBAC: get, list, patch…
        resource: plural name of the kind.
        code: HTTP status; 0 = no answer.
    """

    verb: str
    resource: str
    code: int


@dataclass(frozen=True, slots=True)
class _Call:
    verb: str
    kind: Kind
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    content_type: str = _JSON
    accept: str = _JSON

    @property
    def what(self) -> str:
        return f"{self.verb} {self.path}"

    def arguments(self) -> dict[str, Any]:
        """For aiohttp."""
        if self.body is None:
            return {"params": self.params, "headers": {"Accept": self.accept}}
        headers = {"Accept": self.accept, "Content-Type": self.content_type}
        return {"params": self.params, "headers": headers, "data": msgspec.json.encode(self.body)}


def _ignore(_request: Request) -> None:
    """Nobody counts."""


@dataclass(slots=True)
class KubeClient:
    """One session with the API server. An async context manager; used by one event loop.

    Args:
        login: gives credentials; called again when the server refuses them.
        count: told of every request.
        timeout_s: of one request.
    """

    login: Login
    count: Callable[[Request], None] = _ignore
    timeout_s: float = REQUEST_TIMEOUT_S
    _server: str = ""
    _session: aiohttp.ClientSession | None = None
    _login_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __aenter__(self) -> Self:
        await self._log_in(None)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        try:
            return await self._send(_Call("get", kind, "GET", kind.path(namespace, name)))
        except ApiNotFound:
            return None

    async def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Listed]:
        """See `Cluster.list_metadata`."""
        params = {"limit": str(_PAGE), "labelSelector": selector}
        while True:
            call = _Call("list", kind, "GET", kind.path(namespace), params=params, accept=_METADATA_ONLY)
            page = _decoded(call, await self._exchange(call), _Page)
            for item in page.items or ():
                meta = item.metadata
                yield Listed(meta.namespace, meta.name, meta.uid, int(meta.resource_version), meta.labels)
            if not page.metadata.continue_:
                return
            params = params | {"continue": page.metadata.continue_}

    async def serves(self, kind: Kind) -> bool:
        """See `Cluster.serves`."""
        try:
            found = await self._send(_Call("discover", kind, "GET", kind.root))
        except ApiNotFound:
            return False
        return any(resource.get("name") == kind.plural for resource in found.get("resources", ()))

    async def apply(self, manifest: Manifest, *, force: bool) -> Manifest:
        """See `Cluster.apply`."""
        kind, meta = KINDS[manifest["kind"]], manifest["metadata"]
        params = {"fieldManager": MANAGER, "force": "true" if force else "false"}
        path = kind.path(meta["namespace"], meta["name"])
        call = _Call("patch", kind, "PATCH", path, manifest, params, _APPLY)
        status, text = await self._answer(call)
        if status == HTTPStatus.OK and not force:
            # It appeared since we looked. To apply nothing is to give back every field that we just took.
            nothing = {"apiVersion": kind.api, "kind": kind.name, "metadata": {"name": meta["name"]}}
            await self._send(_Call("patch", kind, "PATCH", path, nothing, params, _APPLY))
            raise ApiConflict(call.what, HTTPStatus.CONFLICT, "somebody else made an object of this name")
        return _decoded(call, text, dict)

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """See `Cluster.apply_status`."""
        kind, meta = KINDS[manifest["kind"]], manifest["metadata"]
        params = {"fieldManager": STATUS_MANAGER, "force": "true"}
        path = kind.path(meta["namespace"], meta["name"], "status")
        return await self._send(_Call("patch", kind, "PATCH", path, manifest, params, _APPLY))

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """See `Cluster.merge`."""
        path = kind.path(namespace, name)
        return await self._send(_Call("patch", kind, "PATCH", path, patch, _BY_US, _MERGE))

    async def create(self, kind: Kind, namespace: str, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        return await self._send(_Call("create", kind, "POST", kind.path(namespace), manifest, _BY_US))

    async def replace(self, kind: Kind, namespace: str, name: str, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        return await self._send(_Call("update", kind, "PUT", kind.path(namespace, name), manifest, _BY_US))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """See `Cluster.delete`."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        answer = await self._send(_Call("delete", kind, "DELETE", kind.path(namespace, name), options))
        return answer if answer.get("metadata", {}).get("uid") == uid else None

    async def _send(self, call: _Call) -> Manifest:
        return _decoded(call, await self._exchange(call), dict)

    async def _exchange(self, call: _Call) -> bytes:
        return (await self._answer(call))[1]

    async def _answer(self, call: _Call) -> tuple[int, bytes]:
        session = self._session
        for attempt in range(2):
            assert session is not None, "the client is not open"
            try:
                async with session.request(call.method, self._server + call.path, **call.arguments()) as response:
                    text = await response.read()
                    status, retry_after = response.status, response.headers.get("Retry-After", "")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.count(Request(call.verb, call.kind.plural, 0))
                raise ApiUnavailable(call.what, 0, str(error) or type(error).__name__) from error
            self.count(Request(call.verb, call.kind.plural, status))
            if status != HTTPStatus.UNAUTHORIZED or attempt:
                break
            session = await self._log_in(session)
        if status >= HTTPStatus.BAD_REQUEST:
            raise _error(call.what, status, text, retry_after)
        return status, text

    async def _log_in(self, refused: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
        async with self._login_lock:
            if self._session is not None and self._session is not refused:
                return self._session  # somebody else did it meanwhile
            info = self.login()
            self._server = info.server.rstrip("/")
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, ssl=info.as_ssl_context()),
                headers=info.as_http_headers() | {"User-Agent": MANAGER},
                timeout=aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                proxy=info.proxy_url,
            )
            if refused is not None:
                await refused.close()
            return self._session


def _decoded(call: _Call, body: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.MsgspecError as error:  # of a proxy, for instance
        raise ApiUnavailable(call.what, HTTPStatus.OK, f"unreadable answer: {error}") from error


def _error(what: str, status: int, body: bytes, retry_after: str) -> ApiError:
    """The error that a status stands for, in the server's words."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = {}
    facts = answer if isinstance(answer, dict) else {}
    message = str(facts.get("message") or body[:_LONGEST_MESSAGE].decode(errors="replace"))
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and "metadata.uid: Invalid value" in message:
        status = HTTPStatus.CONFLICT  # a uid in a patch is a precondition to us, and a field like others to the server
    if status == HTTPStatus.FORBIDDEN and any(one.get("reason") == "NamespaceTerminating" for one in _causes(facts)):
        return NamespaceEnding(what, status, message)
    wait_s = float(retry_after) if retry_after.isdigit() else 0.0
    classes: dict[int, type[ApiError]] = {
        HTTPStatus.BAD_REQUEST: ApiInvalid,
        HTTPStatus.UNAUTHORIZED: ApiDenied,
        HTTPStatus.FORBIDDEN: ApiDenied,
        HTTPStatus.NOT_FOUND: ApiNotFound,
        HTTPStatus.CONFLICT: ApiConflict,
        HTTPStatus.GONE: ApiNotFound,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ApiInvalid,
        HTTPStatus.UNPROCESSABLE_ENTITY: ApiInvalid,
    }
    return classes.get(status, ApiUnavailable)(what, status, message, wait_s)


def _causes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (status.get("details") or {}).get("causes") or []
