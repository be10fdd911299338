"""Typed access to what an application keeps in ``app.state``, and the lookup of a request's model."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from fastapi import Request

from millpond.server.served.indexes import ServedIndexes
from millpond.server.served.models import ServedModel, ServedModels
from millpond.server.settings.config import ServerConfig
from millpond.server.telemetry.metrics import Metrics
from millpond.tasks import Task


class Drain:
    """A server that is shutting down still answers, and announces that it takes no new work."""

    def __init__(self) -> None:
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` was called."""
        return self._begun

    def begin(self) -> None:
        """From now on ``/ready`` answers 503, and every connection is closed after its response."""
        self._begun = True


def models_of(request: Request) -> ServedModels:
    """The served models."""
    return cast("ServedModels", request.app.state.models)


def indexes_of(request: Request) -> ServedIndexes:
    """The served indexes."""
    return cast("ServedIndexes", request.app.state.indexes)


def config_of(request: Request) -> ServerConfig:
    """The server's configuration."""
    return cast("ServerConfig", request.app.state.config)


def drain_of(request: Request) -> Drain:
    """Whether the server is shutting down."""
    return cast("Drain", request.app.state.drain)


def metrics_of(request: Request) -> Metrics:
    """The application's metrics."""
    return cast("Metrics", request.app.state.metrics)


def find_model(request: Request, name: str | None, *, tasks: Collection[Task], api: str) -> ServedModel:
    """:meth:`ServedModels.find`, with the model recorded for the log and the metrics."""
    return record_model(request, models_of(request).find(name, tasks=tasks, api=api))


def record_model(request: Request, model: ServedModel) -> ServedModel:
    """``model``, whose name labels the request in the log and the metrics from here on, even if it fails."""
    request.state.model = model.name
    return model


def named_model(request: Request, name: str | None) -> str | None:
    """The name in the body, or in the query string: TEI serves one model, so its bodies have no field for it."""
    return name or request.query_params.get("model")
