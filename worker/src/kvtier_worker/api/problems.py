"""What a client did wrong or the engine could not do, as OpenAI's clients expect to read it."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvtier_worker.engine.frontend import EngineBusy, PromptTooLong
from kvtier_worker.errors import KVTierError

CLIENT_CLOSED = 499
"""nginx's status for a client that did not wait for its answer."""

_BRIEF = 60
_RETRY_AFTER_S = {429: "1", 503: "2"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: what is wrong, with the value and the fix.
        param: the request field that is to blame; None = none in particular.
        code: a word that programs can match; None = none.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")  # noqa: PLR2004

    def body(self) -> dict[str, object]:
        """The JSON body."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"Retry-After": _RETRY_AFTER_S[self.status]} if self.status in _RETRY_AFTER_S else {}
        if self.status == 401:  # noqa: PLR2004
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def brief(text: str) -> str:
    """Enough of ``text`` to recognise it: what a client sent is not sent back by the megabyte."""
    return text if len(text) <= _BRIEF else text[: _BRIEF - 3] + "..."


def bad_request(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def engine_problem(error: KVTierError) -> ApiError:
    """What the engine's refusal or failure is to a client."""
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error), code="engine_busy")
    return ApiError(503, str(error), code="engine_not_ready")


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def answer_problem(request: Request, error: Exception) -> Response:
    """The front's one exception handler."""
    match error:
        case ApiError():
            return error.response()
        case KVTierError():
            return engine_problem(error).response()
        case HTTPException():  # unknown paths and methods
            return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
        case ClientDisconnect():  # while it sent the body: nobody reads this
            return Response(status_code=CLIENT_CLOSED)
        case _:
            raise error
