"""What a route needs of the application."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from millpond.server.config import ServerConfig
from millpond.server.drain import Drain
from millpond.server.metrics import Metrics
from millpond.server.served import ServedModels


def models_of(request: Request) -> ServedModels:
    """The models that are served."""
    return cast("ServedModels", request.app.state.models)


def config_of(request: Request) -> ServerConfig:
    """How the server is to behave."""
    return cast("ServerConfig", request.app.state.config)


def drain_of(request: Request) -> Drain:
    """Whether the server is about to stop."""
    return cast("Drain", request.app.state.drain)


def metrics_of(request: Request) -> Metrics:
    """What is counted."""
    return cast("Metrics", request.app.state.metrics)
