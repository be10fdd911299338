"""The ASGI application: routes over the served models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from millpond.errors import MillpondError
from millpond.server.api import ROUTERS, openapi
from millpond.server.api.openapi import ErrorAnswer
from millpond.server.errors import answer_error, answer_violation
from millpond.server.middleware import ApiKeys, RequestMiddleware
from millpond.server.requests.body_budget import BodyBudget
from millpond.server.requests.prepare_executor import PrepareExecutor
from millpond.server.served.indexes import ServedIndexes
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ServerConfig
from millpond.server.state import Drain
from millpond.server.telemetry.metrics import Metrics, MetricsMiddleware
from millpond.server.telemetry.timings import TimingHeadersMiddleware
from millpond.server.telemetry.tracing import TracingMiddleware, tracing_of


def create_app(models: ServedModels, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves ``models`` and the indexes of ``config``, and closes them when it is shut down.

    ``app.state.drain.begin()`` announces the shutdown.
    """
    config = config or ServerConfig()
    indexes = ServedIndexes.load(config.indexes, models)
    prepare_executor = PrepareExecutor()
    tracing = tracing_of(config.otlp_traces_endpoint, os.environ)
    routes = {route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)}
    metrics = Metrics(models, paths={*routes, "/docs", "/openapi.json"})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(models.close)  # waits for the queued work
            await asyncio.to_thread(indexes.close)
            prepare_executor.close()
            metrics.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    # /docs from files in the package; FastAPI's own page loads them from a content delivery network.
    app = FastAPIOffline(
        title="millpond",
        version=version("millpond"),
        lifespan=lifespan,
        redoc_url=None,
        static_url="/page/docs",
        favicon_url="page/icon.svg",
        # FastAPI's own telemetry would use any exporter of the process; tracing.py uses only the configured endpoint.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        # Without a default FastAPI documents its own 422 for every route with parameters.
        responses={"default": {"model": ErrorAnswer, "description": "What went wrong."}},
    )
    app.state.models = models
    app.state.indexes = indexes
    app.state.config = config
    app.state.prepare_executor = prepare_executor
    app.state.metrics = metrics
    app.state.drain = Drain()
    app.state.body_budget = BodyBudget(config.max_body_bytes)
    app.openapi = openapi.describe(app, key_required=ApiKeys(config.api_keys).required)  # type: ignore[method-assign]  # as FastAPI documents
    app.add_exception_handler(MillpondError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(RequestValidationError, answer_violation)
    # The one added last is the outermost.
    app.add_middleware(TimingHeadersMiddleware)
    app.add_middleware(RequestMiddleware, config=config, drain=app.state.drain, body_budget=app.state.body_budget)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing)
    if config.cors_origins:  # outermost, so that browsers can read a 401 too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    for router in ROUTERS:
        app.include_router(router)
    return app
