"""Puts the HTTP front together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvtier_worker.api.admin import admin_router
from kvtier_worker.api.endpoints import generation_router, model_router
from kvtier_worker.api.front import Front
from kvtier_worker.api.metrics import FrontMetrics
from kvtier_worker.api.middleware import KeyGuard, RequestCounter
from kvtier_worker.api.probes import probe_router
from kvtier_worker.api.problems import ApiError, answer_problem
from kvtier_worker.api.tokenizer import TextTokenizer
from kvtier_worker.contract import WorkerSettings
from kvtier_worker.engine.frontend import EngineClient
from kvtier_worker.errors import KVTierError


def create_app(
    engine: EngineClient, tokenizer: TextTokenizer, settings: WorkerSettings, metrics: FrontMetrics
) -> FastAPI:
    """The API, with ``/admin`` unless ``--admin_port`` puts it elsewhere.

    Args:
        engine: port to the engine thread.
        tokenizer: of the served model.
        settings: of this process.
        metrics: the front's, in the registry that ``/metrics`` shows.
    """
    front = Front(engine, tokenizer, settings, metrics)
    app = _bare_app()
    app.include_router(probe_router(front))
    app.include_router(model_router(front))
    app.include_router(generation_router(front))
    if not settings.admin_port:
        app.include_router(admin_router(front))
    app.add_middleware(KeyGuard, api_key=settings.api_key)
    app.add_middleware(RequestCounter, metrics=metrics)
    return app


def create_admin_app(
    engine: EngineClient, tokenizer: TextTokenizer, settings: WorkerSettings, metrics: FrontMetrics
) -> FastAPI:
    """What listens on ``--admin_port``: ``/admin`` and the probes."""
    front = Front(engine, tokenizer, settings, metrics)
    app = _bare_app()
    app.include_router(probe_router(front))
    app.include_router(admin_router(front))
    app.add_middleware(KeyGuard, api_key=settings.api_key)
    return app


def _bare_app() -> FastAPI:
    app = FastAPI(title="kvtier", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (ApiError, KVTierError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, answer_problem)
    return app
