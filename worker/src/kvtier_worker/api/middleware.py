"""Around every endpoint: the key is checked, generation requests are counted. Plain ASGI, so streams pass untouched."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.probes import OPEN_PATHS
from kvtier_worker.api.problems import CLIENT_CLOSED, ApiError

_COUNTED = frozenset({"/v1/completions", "/v1/chat/completions"})


class KeyGuard:
    """Lets a request in when it brings ``Authorization: Bearer KEY``; probes are open.

    Args:
        app: what lies behind.
        api_key: the key; empty = everybody may enter.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or answer 401."""
        if scope["type"] != "http" or not self._expected or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "missing or wrong key; send the header Authorization: Bearer KEY", code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)


class RequestCounter:
    """Counts generation requests and their answers.

    Args:
        app: what lies behind.
        metrics: where to count.
    """

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count and pass on."""
        if scope["type"] != "http" or scope["path"] not in _COUNTED:
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.request_arrived()
        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.request_ended(scope["path"], status)
