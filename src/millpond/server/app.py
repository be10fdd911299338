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
from millpond.server.api import ROUTERS_OF, openapi
from millpond.server.api.openapi import ErrorAnswer
from millpond.server.errors import answer_error
from millpond.server.middleware import RequestMiddleware, RouteKeys
from millpond.server.requests.body_budget import BodyBudget
from millpond.server.requests.lone_caller import LoneCaller
from millpond.server.requests.prepare_executor import PrepareExecutor
from millpond.server.requests.response_budget import ResponseBudget
from millpond.server.routing import DirectRoutes
from millpond.server.served.indexes import ServedIndexes
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ServerConfig
from millpond.server.state import Drain
from millpond.server.telemetry.metrics import Metrics, MetricsMiddleware
from millpond.server.telemetry.timings import TimingHeadersMiddleware
from millpond.server.telemetry.tracing import TracingMiddleware, tracing_of


def create_app(models: ServedModels, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that serves models and indexes, and closes them when it is shut down.

    ``app.state.drain.begin()`` announces the shutdown.

    Args:
        models: The models.
        config: The configuration, with the indexes; by default :class:`ServerConfig` as it is.

    Returns:
        The application.

    Raises:
        InvalidRequestError: An index cannot be opened.
        FingerprintMismatchError: None of the models built an index.
        MissingExtraError: Traces are asked for, and OpenTelemetry is not installed.
    """
    config = config or ServerConfig()
    # /docs from files in the package; FastAPI's own page loads them from a content delivery network.
    app = FastAPIOffline(
        title="millpond",
        version=version("millpond"),
        lifespan=_closing,
        redoc_url=None,
        static_url="/page/docs",
        favicon_url="page/icon.svg",
        # FastAPI's own telemetry would use any exporter of the process; tracing.py uses only the configured endpoint.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        # Without a default FastAPI documents its own 422 for every route with parameters.
        responses={"default": {"model": ErrorAnswer, "description": "What went wrong."}},
    )
    app.state.models = models
    app.state.indexes = ServedIndexes.load(config.indexes, models)
    app.state.config = config
    app.state.prepare_executor = PrepareExecutor()
    app.state.lone_caller = LoneCaller()
    routers = ROUTERS_OF[config.protocol]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    app.state.metrics = Metrics(models, paths={*(route.path for route in routes), "/docs", "/openapi.json"})
    app.state.drain = Drain()
    app.state.body_budget = BodyBudget(config.max_body_bytes)
    app.state.response_budget = ResponseBudget(config.max_response_bytes)
    app.state.tracing = tracing_of(config.otlp_traces_endpoint, os.environ)
    app.openapi = openapi.describe(app, key_required=RouteKeys(config.api_keys).required)  # type: ignore[method-assign]  # as FastAPI documents
    for error in (MillpondError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, answer_error)
    app.add_middleware(DirectRoutes, routes=routes)
    _add_middleware(app, config)
    for router in routers:
        app.include_router(router)
    return app


@asynccontextmanager
async def _closing(app: FastAPI) -> AsyncIterator[None]:
    """The life of an application, which ends with what it holds."""
    try:
        yield
    finally:
        await asyncio.to_thread(app.state.models.close)  # waits for the queued work
        await asyncio.to_thread(app.state.indexes.close)
        app.state.prepare_executor.close()
        app.state.metrics.close()
        if app.state.tracing is not None:
            await asyncio.to_thread(app.state.tracing.close)


def _add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """Wrap the routes; what is added last is the outermost."""
    app.add_middleware(TimingHeadersMiddleware)
    budgets = (app.state.body_budget, app.state.response_budget)
    app.add_middleware(RequestMiddleware, config=config, drain=app.state.drain, budgets=budgets)
    app.add_middleware(MetricsMiddleware, metrics=app.state.metrics)
    if app.state.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=app.state.tracing)
    if config.cors_origins:  # outermost, so that browsers can read a 401 too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
