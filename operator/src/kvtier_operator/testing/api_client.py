"""A small synchronous client of a Kubernetes API server, for tests: JSON in, JSON out, connections kept. IO.

Any thread may call it; each has a connection of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT_S = 30.0
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_STALE = (
    http.client.RemoteDisconnected,
    http.client.CannotSendRequest,
    BrokenPipeError,
    ConnectionResetError,
    ssl.SSLEOFError,
)
"""What a kept connection says when the server closed it meanwhile."""

Json = dict[str, Any]


class RequestFailed(Exception):
    """The API server refused.

    Attributes:
        status: of HTTP.
        body: its Status object, or the text it sent, under ``message``.
    """

    def __init__(self, method: str, path: str, status: int, body: Json) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{method} {path}: {status} {body.get('reason', '')}: {body.get('message', '')}")


class Watch:
    """A stream of watch events; iterate it in one thread, close it from any."""

    def __init__(self, connection: http.client.HTTPSConnection, path: str, headers: Mapping[str, str]) -> None:
        connection.request("GET", path, headers=dict(headers))
        assert isinstance(connection.sock, socket.socket)
        self._raw = socket.socket(fileno=os.dup(connection.sock.fileno()))
        self._connection = connection
        self._response = connection.getresponse()
        if self._response.status != HTTPStatus.OK:
            body = _parsed(self._response.read())
            self.release()
            raise RequestFailed("WATCH", path, self._response.status, body)

    def __iter__(self) -> Iterator[Json]:
        while line := self._response.readline():
            yield json.loads(line)

    def close(self) -> None:
        """End the stream: whoever iterates meets its end, or an OSError."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the connection; for the thread that iterated, when it is done."""
        self._response.close()
        self._connection.close()
        self._raw.close()


class ApiClient:
    """Talks to one API server as one user.

    Args:
        server: URL, as in ``https://127.0.0.1:6443``.
        ca_file: certificate to trust.
        token: of the user.
    """

    def __init__(self, server: str, ca_file: Path, token: str) -> None:
        url = urlsplit(server)
        self._host, self._port = url.hostname or "", url.port or 443
        self._tls = ssl.create_default_context(cafile=str(ca_file))
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._lock = threading.Lock()
        self._connections: dict[int, http.client.HTTPSConnection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def get(self, path: str) -> Json:
        """Read an object or a list."""
        return self.request("GET", path)

    def create(self, path: str, body: Mapping[str, Any]) -> Json:
        """Post an object to its collection."""
        return self.request("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any], content_type: str = MERGE_PATCH) -> Json:
        """Change an object."""
        return self.request("PATCH", path, body, content_type)

    def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Json:
        """Delete an object, with DeleteOptions."""
        return self.request("DELETE", path, options)

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content_type: str = "application/json"
    ) -> Json:
        """One request.

        Args:
            method: of HTTP.
            path: with the query.
            body: sent as JSON, which every kind of patch accepts.
            content_type: of the body.

        Raises:
            RequestFailed: the server refused.
            OSError, http.client.HTTPException: no server, or it went away.
        """
        status, answer = self._exchange(method, path, body, content_type)
        if status >= HTTPStatus.BAD_REQUEST:
            raise RequestFailed(method, path, status, _parsed(answer))
        return _parsed(answer)

    def text(self, path: str) -> str:
        """What a GET returns, as it is: ``/metrics``, ``/readyz?verbose``."""
        status, answer = self._exchange("GET", path, None, "")
        if status >= HTTPStatus.BAD_REQUEST:
            raise RequestFailed("GET", path, status, _parsed(answer))
        return answer.decode(errors="replace")

    def watch(self, path: str) -> Watch:
        """Open a watch; ``path`` has ``watch=1`` in its query.

        Raises:
            RequestFailed, OSError, http.client.HTTPException: as `request`.
        """
        connection = http.client.HTTPSConnection(self._host, self._port, context=self._tls)
        return Watch(connection, path, self._headers)

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, content_type: str) -> tuple[int, bytes]:
        payload = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": content_type} if payload is not None else {})
        connection = self._connection()
        kept = connection.sock is not None
        try:
            return _send(connection, method, path, payload, headers)
        except _STALE:
            connection.close()
            if not kept:
                raise
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
        return _send(connection, method, path, payload, headers)

    def _connection(self) -> http.client.HTTPSConnection:
        me = threading.get_ident()
        with self._lock:
            if me not in self._connections:
                self._connections[me] = http.client.HTTPSConnection(
                    self._host, self._port, timeout=TIMEOUT_S, context=self._tls
                )
            return self._connections[me]


def _send(
    connection: http.client.HTTPSConnection, method: str, path: str, payload: bytes | None, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    connection.request(method, path, body=payload, headers=dict(headers))
    response = connection.getresponse()
    return response.status, response.read()


def _parsed(answer: bytes) -> Json:
    try:
        body = json.loads(answer)
    except ValueError:
        return {"message": answer.decode(errors="replace").strip()}
    return body if isinstance(body, dict) else {"message": body}
