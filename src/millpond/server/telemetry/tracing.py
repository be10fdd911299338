"""Tracing: one span for each request that runs a model, with the parts of its call as child spans.

OpenTelemetry is imported, and spans are sent, only if an endpoint is configured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from millpond.errors import MissingExtraError
from millpond.server.telemetry.scope import StatusObserver

if TYPE_CHECKING:
    from millpond.server.telemetry.spans import OpenTelemetrySpans

logger = logging.getLogger(__name__)

# OpenTelemetry's own variables; /v1/traces is appended to the second.
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ADVICE = "pip install 'millpond[otel]'"


class TracingMiddleware:
    """ASGI middleware: a span for each POST; health checks and metric scrapes have none."""

    def __init__(self, app: ASGIApp, *, tracing: OpenTelemetrySpans) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        response = StatusObserver(send)
        span = self._tracing.begin(scope)
        try:
            await self._app(scope, receive, response)
        finally:
            self._tracing.end(span, scope, response.status)


def check_installed(endpoint: str | None) -> None:
    """Raise if a flag needs OpenTelemetry and it is missing; called before models are loaded for minutes."""
    if endpoint:
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: {_ADVICE}") from error


def tracing_of(endpoint: str | None, environ: Mapping[str, str]) -> OpenTelemetrySpans | None:
    """Tracing to an OTLP endpoint over HTTP, or ``None`` if none is configured."""
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    if not endpoint and variable is None:
        return None
    check_installed(endpoint)
    try:
        from millpond.server.telemetry.spans import OpenTelemetrySpans, otlp_processor
    except ImportError:
        logger.warning("%s is set, and OpenTelemetry is not installed, so there are no traces: %s", variable, _ADVICE)
        return None
    return OpenTelemetrySpans(otlp_processor(endpoint))
