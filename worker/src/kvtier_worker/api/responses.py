"""The answer to a generation request, whole or streamed. It watches the client and cancels when the client leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from kvtier_worker.api.answers import AnswerFormat, join
from kvtier_worker.api.choices import Delta
from kvtier_worker.api.front import ClientGone, Front, until_disconnect
from kvtier_worker.api.generation import ChoiceDelta, Generation
from kvtier_worker.api.problems import ApiError, json_response
from kvtier_worker.api.schema import GenerationRequest

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"


class GenerationResponse(Response):
    """Generates while it is being sent, so that the sequences live exactly as long as somebody listens.

    Args:
        front: where to work.
        request: what the client asked.
        generation: its sequences, not yet submitted.
        form: the endpoint's way to write choices.
        show_silent: stream chunks even when they carry no text.
    """

    def __init__(
        self,
        front: Front,
        request: GenerationRequest,
        generation: Generation,
        form: AnswerFormat,
        *,
        show_silent: bool,
    ) -> None:
        super().__init__()
        self._front = front
        self._request = request
        self._form = form
        self._show_silent = show_silent
        self._head = {
            "id": generation.request_id,
            "object": form.chunk_object if request.stream else form.whole_object,
            "created": int(front.now()),
            "model": front.model_id,
        }
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; return early, with everything cancelled, when the client leaves."""
        work = self._stream(scope, receive, send) if self._request.stream else self._whole(scope, receive, send)
        try:
            await until_disconnect(receive, work)
        except ClientGone:
            self._front.metrics.client_left()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await self._collect())
        except ApiError as error:
            response = error.response()
        await response(scope, receive, send)

    async def _collect(self) -> dict[str, Any]:
        async with self._generation as generation:
            parts: list[list[Delta]] = [[] for _ in generation.choices]
            async for news in generation.deltas():
                for new in news:
                    parts[new.index].append(new.delta)
            choices = [self._form.whole(index, join(deltas)) for index, deltas in enumerate(parts)]
            return self._head | {"choices": choices, "usage": generation.usage()}

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._generation as generation:
                await send(_start())
                started = True
                opened: set[int] = set()
                async for news in generation.deltas():
                    if chunk := self._events(news, opened):
                        await send(_body(chunk))
                usage = self._event([], generation.usage()) if self._request.include_usage else b""
            await send(_body(usage + _DONE, more=False))
        except ApiError as error:
            if started:
                await send(_body(_sse(error.body()) + _DONE, more=False))
            else:
                await error.response()(scope, receive, send)

    def _events(self, news: Sequence[ChoiceDelta], opened: set[int]) -> bytes:
        events: list[bytes] = []
        for new in news:
            if new.delta.is_empty and not self._show_silent:
                continue
            if new.index not in opened:
                opened.add(new.index)
                if (opening := self._form.opening(new.index)) is not None:
                    events.append(self._event([opening]))
            events.append(self._event([self._form.chunk(new.index, new.delta)]))
        return b"".join(events)

    def _event(self, choices: list[dict[str, Any]], usage: object = None) -> bytes:
        event = {**self._head, "choices": choices}
        if self._request.include_usage:
            event["usage"] = usage
        return _sse(event)


def _sse(event: object) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _start() -> dict[str, Any]:
    headers = {"content-type": "text/event-stream; charset=utf-8"} | _SSE_HEADERS
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _body(chunk: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
