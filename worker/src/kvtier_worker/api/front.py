"""What every endpoint works with: the engine, the tokenizer, the settings, and the limits they make together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Message, Receive

from kvtier_worker.api.bridge import OutputBridge
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.problems import ApiError, bad_request, brief
from kvtier_worker.api.prompts import Prompt, check_vocabulary
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.core.keys import effective_model_id
from kvtier_worker.engine.frontend import EngineClient

MAX_BODY_BYTES = 64 << 20
_LONG_TEXT = 4096  # characters from which encoding leaves the event loop

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Front:
    """One engine's front.

    Attributes:
        engine: port to the engine thread.
        tokenizer: of the served model.
        settings: of this process.
        metrics: where the front counts.
        clock: monotonic seconds.
        now: seconds since the epoch, for ``created``.
        new_id: text that no other request has.
        bridge: from the engine thread to the event loop.
    """

    engine: EngineClient
    tokenizer: TextTokenizer
    settings: WorkerSettings
    metrics: FrontMetrics
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    bridge: OutputBridge = field(default_factory=OutputBridge)

    @property
    def model_id(self) -> str:
        """Name of the model in the API."""
        return effective_model_id(self.settings)

    def request_id(self, prefix: str) -> str:
        """A fresh id of an answer, as ``cmpl-…``."""
        return f"{prefix}-{self.new_id()}"

    def check_ready(self) -> None:
        """Refuse while the engine takes no requests.

        Raises:
            ApiError: 503 with the reason.
        """
        health = self.engine.health()
        if not health.ready:
            raise ApiError(503, f"not ready: {health.reason}; try again later", code="engine_not_ready")

    def check_model(self, name: str) -> None:
        """Refuse another model's name; no name means the one that is served.

        Raises:
            ApiError: 404.
        """
        if name and name != self.model_id:
            message = f"the model {brief(name)!r} does not exist; this server serves {self.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """Token ids of a prompt, checked against the vocabulary.

        Raises:
            ApiError: no token at all, or an id the model does not have.
        """
        if isinstance(prompt, str):
            if len(prompt) < _LONG_TEXT:
                ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            else:
                ids = await asyncio.to_thread(self.tokenizer.encode, prompt, add_special_tokens=add_special_tokens)
        else:
            ids = prompt
        if not ids:
            raise bad_request(param, "encodes to no token; give at least one")
        check_vocabulary(ids, self.engine.info.vocab_size, param)
        return ids

    def output_limit(self, prompt_tokens: int, asked: int | None, default: int | None, param: str) -> int:
        """Tokens to generate at most.

        Args:
            prompt_tokens: length of the prompt.
            asked: what the client wants; None = ``default``, or all that fits.
            default: the API's default; None = all that fits.
            param: the field the prompt came in.

        Raises:
            ApiError: it cannot fit; the message has both numbers.
        """
        longest = self.engine.info.max_model_len
        left = longest - prompt_tokens
        wanted = asked or 1
        if wanted > left:
            output = f" and {asked} to generate are {prompt_tokens + wanted}" if asked else ""
            message = f"{prompt_tokens} prompt tokens{output}; this model takes at most {longest} in all"
            if not asked:
                message += ", with at least 1 to generate"
            raise bad_request(param, message, code="context_length_exceeded")
        return asked or (left if default is None else min(default, left))

    def extra_key(self, cache_salt: str | None) -> bytes:
        """Bytes to mix into block hashes.

        Raises:
            ApiError: a salt without ``--enable_cache_salt``.
        """
        if cache_salt is None:
            return b""
        if not self.settings.enable_cache_salt:
            raise bad_request("cache_salt", "this server was started without --enable_cache_salt=true; leave it out")
        return cache_salt.encode()


async def read_request_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 beyond ``limit`` bytes.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body has more than {limit} bytes; send less", code="request_too_large")
        parts.append(part)
    return b"".join(parts)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run ``work``, and cancel it when the client goes away. The request's body must have been read.

    Raises:
        ClientGone: the client left first; ``work`` has ended when this is raised.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
