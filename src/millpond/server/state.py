"""Typed access to what an application keeps in ``app.state``, and the lookup of a request's model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, cast

from fastapi import Request

from millpond.server.served.indexes import ServedIndexes
from millpond.server.served.models import ServedModel, ServedModels
from millpond.server.settings.config import ServerConfig
from millpond.server.telemetry.metrics import Metrics
from millpond.tasks import Task


class Drain:
    """A server that is shutting down still answers, and announces that it takes no new work."""

    begun = False

    def begin(self) -> None:
        """From now on ``/ready`` answers 503, and every connection is closed after its response."""
        self.begun = True


class AppState(Protocol):
    """What routes read from ``app.state``."""

    models: ServedModels
    indexes: ServedIndexes
    config: ServerConfig
    drain: Drain
    metrics: Metrics


def state_of(request: Request) -> AppState:
    """The state of the application."""
    return cast("AppState", request.app.state)


def find_model(request: Request, name: str | None, *, tasks: Collection[Task], api: str) -> ServedModel:
    """:meth:`ServedModels.find`, with the model recorded for the log and the metrics."""
    return record_model(request, state_of(request).models.find(name, tasks=tasks, api=api))


def record_model(request: Request, model: ServedModel) -> ServedModel:
    """``model``, whose name labels the request in the log and the metrics from here on, even if it fails."""
    request.state.model = model.name
    return model


def named_model(request: Request, name: str | None) -> str | None:
    """The name in the body, or in the query string: TEI serves one model, so its bodies have no field for it."""
    return name or request.query_params.get("model")
