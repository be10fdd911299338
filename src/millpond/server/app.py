"""The application: routes over served models."""

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
from millpond.server import openapi
from millpond.server.admission.body_budget import BodyBudget
from millpond.server.admission.drain import Drain
from millpond.server.errors import answer_error
from millpond.server.middleware import Gate, Keys
from millpond.server.models import ServedModels
from millpond.server.requests.calls import PrepareExecutor
from millpond.server.routes import ROUTERS
from millpond.server.schemas.error import ErrorAnswer
from millpond.server.settings.config import ServerConfig
from millpond.server.telemetry.metrics import Measured, Metrics
from millpond.server.telemetry.timings import TimingHeaders
from millpond.server.telemetry.tracing import Traced, tracing_of
from millpond.server.violations import answer_violation


def create_app(models: ServedModels, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application that answers for ``models``, and closes them when it is shut down.

    ``app.state.drain.begin()`` announces that it is about to.
    """
    config = config or ServerConfig()
    desk = PrepareExecutor()
    tracing = tracing_of(config.otlp_traces_endpoint, os.environ)
    routes = {route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)}
    metrics = Metrics(models, paths={*routes, "/docs", "/openapi.json"})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(models.close)  # which waits for what is queued
            desk.close()
            metrics.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    # /docs out of files that come with it, where FastAPI's own asks a content delivery network.
    app = FastAPIOffline(
        title="millpond",
        version=version("millpond"),
        lifespan=lifespan,
        redoc_url=None,
        static_url="/page/docs",
        favicon_url="page/icon.svg",
        # FastAPI's own, where it has any, tells whoever else in the process listens; tracing.py tells who asks.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        # FastAPI adds its own 422 to whatever has parameters, unless it is told what failures look like.
        responses={"default": {"model": ErrorAnswer, "description": "What went wrong."}},
    )
    app.state.models = models
    app.state.config = config
    app.state.desk = desk
    app.state.metrics = metrics
    app.state.drain = Drain()
    app.state.held = BodyBudget(config.max_body_bytes)
    app.openapi = openapi.describe(app, guarded=Keys(config.api_keys).guard)  # type: ignore[method-assign]  # as FastAPI tells
    app.add_exception_handler(MillpondError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(RequestValidationError, answer_violation)
    # The last one is the outermost.
    app.add_middleware(TimingHeaders)
    app.add_middleware(Gate, config=config, drain=app.state.drain, held=app.state.held)
    app.add_middleware(Measured, metrics=metrics)
    if tracing is not None:
        app.add_middleware(Traced, tracing=tracing)
    if config.cors_origins:  # outermost: an answer to a wrong key is to be readable in the browser, too
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
