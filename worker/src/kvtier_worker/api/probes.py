"""What a supervisor asks: is it alive, will it serve, what has it counted, which version is it. Open to everybody."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvtier_worker.api.front import Front
from kvtier_worker.api.problems import json_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Answered without the key."""


def probe_router(front: Front) -> APIRouter:
    """``/health``, ``/ready``, ``/metrics`` and ``/version``."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        state = front.engine.health()
        if state.alive:
            return json_response({"status": "alive"})
        return json_response({"status": "dead", "reason": state.reason}, 503)

    @router.get("/ready")
    async def ready() -> Response:
        state = front.engine.health()
        if state.ready:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": state.reason}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, front.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def kvtier_version() -> Response:
        return json_response({"version": version("kvtier")})

    return router
