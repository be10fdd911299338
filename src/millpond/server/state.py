"""What a route needs of the application."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from millpond.server.config import ServerConfig
from millpond.server.drain import Drain
from millpond.server.held import HeldBytes
from millpond.server.metrics import Metrics
from millpond.server.served import ServedModel, ServedModels


def models_of(request: Request) -> ServedModels:
    """The models that are served."""
    return cast("ServedModels", request.app.state.models)


def meant(request: Request, model: ServedModel) -> ServedModel:
    """``model``; from here on the log and the metrics call the request by it, whatever becomes of it."""
    request.state.model = model.name
    return model


def config_of(request: Request) -> ServerConfig:
    """How the server is to behave."""
    return cast("ServerConfig", request.app.state.config)


def held_of(request: Request) -> HeldBytes:
    """How many bytes of bodies there are."""
    return cast("HeldBytes", request.app.state.held)


def drain_of(request: Request) -> Drain:
    """Whether the server is about to stop."""
    return cast("Drain", request.app.state.drain)


def metrics_of(request: Request) -> Metrics:
    """What is counted."""
    return cast("Metrics", request.app.state.metrics)
