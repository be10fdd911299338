"""What a route needs of the application."""

from __future__ import annotations

from typing import cast

from fastapi import Request

from millpond.server.admission.body_budget import BodyBudget
from millpond.server.admission.drain import Drain
from millpond.server.models import ServedModel, ServedModels
from millpond.server.settings.config import ServerConfig
from millpond.server.telemetry.metrics import Metrics


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


def held_of(request: Request) -> BodyBudget:
    """How many bytes of bodies there are."""
    return cast("BodyBudget", request.app.state.held)


def drain_of(request: Request) -> Drain:
    """Whether the server is about to stop."""
    return cast("Drain", request.app.state.drain)


def metrics_of(request: Request) -> Metrics:
    """What is counted."""
    return cast("Metrics", request.app.state.metrics)
