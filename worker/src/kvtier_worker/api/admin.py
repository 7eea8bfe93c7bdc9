"""``/admin``: drop and probe the cache, check its accounting, drain. Behind the same key as the API."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from kvtier_worker.api.front import Front, read_request_body
from kvtier_worker.api.problems import bad_request, json_response
from kvtier_worker.api.prompts import read_prompts, render_chat
from kvtier_worker.api.schema import read_body
from kvtier_worker.core.ids import Tier
from kvtier_worker.engine.frontend import ProbeReport

_DROPPABLE = (Tier.DEVICE, Tier.HOST)

Result = TypeVar("Result")


class DropRequest(msgspec.Struct, frozen=True):
    """Body of ``/admin/cache/drop``."""

    tiers: Annotated[list[str], msgspec.Meta(min_length=1)]


class ProbeRequest(msgspec.Struct, frozen=True):
    """Body of ``/admin/cache/probe``: a prompt as in a completion, or messages as in a chat."""

    prompt: Any = None
    messages: Any = None
    cache_salt: str | None = None


def admin_router(front: Front) -> APIRouter:
    """The admin endpoints."""
    router = APIRouter(prefix="/admin")

    @router.post("/cache/drop")
    async def drop(request: Request) -> Response:
        body = read_body(await read_request_body(request), DropRequest)
        return json_response({"dropped": await _engine(front.engine.drop_caches(_tiers(body.tiers)))})

    @router.post("/cache/probe")
    async def probe(request: Request) -> Response:
        body = read_body(await read_request_body(request), ProbeRequest)
        token_ids = await _prompt(front, body)
        report = await _engine(front.engine.probe(token_ids, front.extra_key(body.cache_salt)))
        return json_response(_probe_body(report))

    @router.get("/integrity")
    async def integrity() -> Response:
        pools = await _engine(front.engine.integrity())
        return json_response({"ok": all(pool.ok for pool in pools), "pools": pools})

    @router.post("/drain")
    async def drain() -> Response:
        await _engine(front.engine.drain())  # the engine cancels what still runs after --drain_timeout
        return json_response({"drained": True})

    return router


async def _engine(future: Future[Result]) -> Result:
    """The engine's answer. A caller that gives up does not cancel the engine's work."""
    waiting: asyncio.Future[Result] = asyncio.wrap_future(future)
    return await asyncio.shield(waiting)


def _tiers(names: list[str]) -> frozenset[Tier]:
    for name in names:
        if name not in _DROPPABLE:
            raise bad_request("tiers", f"{name!r} cannot be dropped; use {' and '.join(_DROPPABLE)}")
    return frozenset(Tier(name) for name in names)


async def _prompt(front: Front, body: ProbeRequest) -> tuple[int, ...]:
    front.check_ready()
    if body.messages is not None:
        text = render_chat(front.tokenizer, body.messages, {"add_generation_prompt": True})
        return await front.encode(text, add_special_tokens=False, param="messages")
    prompts = read_prompts(body.prompt)
    if len(prompts) > 1:
        raise bad_request("prompt", f"{len(prompts)} prompts; probe one at a time")
    return await front.encode(prompts[0], add_special_tokens=True)


def _probe_body(report: ProbeReport) -> dict[str, object]:
    def held(blocks: int) -> dict[str, object]:
        return {"blocks": blocks, "tokens": blocks * report.block_size}

    return {
        "prompt_tokens": report.prompt_tokens,
        "full_blocks": report.full_blocks,
        "block_size": report.block_size,
        "device": held(report.device_blocks),
        "host": held(report.host_blocks),
        "store": held(report.store_blocks) | {"available": report.store_available},
    }
