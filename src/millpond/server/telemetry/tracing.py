"""Tracing: a span for each request that does work, with its call's parts below it, for OpenTelemetry.

Nothing of OpenTelemetry is imported, and nothing is sent, unless an endpoint is named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpond.errors import MissingExtraError
from millpond.server.middleware import route_path
from millpond.server.telemetry.timings import Work, work_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

# OpenTelemetry's own variables; the second one is what /v1/traces is appended to.
_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ADVICE = "pip install 'millpond[otel]'"


class Tracing:
    """Spans to one place; each application has its own.

    Args:
        processor: Takes the finished spans.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes over the name that is given here.
        resource = Resource.create({"service.name": "millpond", "service.version": version("millpond")})
        self._provider: TracerProvider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("millpond", version("millpond"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """A request's span, a child of the one that its ``traceparent`` header names."""
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return self._tracer.start_span(
            f"{scope['method']} {route_path(scope)}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )

    def end(self, span: Span, scope: Scope, status: int | None) -> None:
        """The request is over; without a status nothing was answered."""
        from opentelemetry.trace import StatusCode

        state = scope.get("state", {})
        work = work_of(scope)
        told: dict[str, Any] = {
            "http.route": getattr(scope.get("route"), "path", None),
            "http.response.status_code": status,
            "gen_ai.request.id": state.get("request_id"),
            "gen_ai.response.model": state.get("model"),
            "gen_ai.usage.input_tokens": None if work is None else work.tokens,
        }
        span.set_attributes({name: value for name, value in told.items() if value is not None})
        if status is None or status >= 500:
            span.set_status(StatusCode.ERROR)
        if work is not None and span.is_recording():
            self._parts(span, work)
        span.end()

    def _parts(self, span: Span, work: Work) -> None:
        """Spans of a call's parts, one behind the other, as they are for all but the largest calls."""
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(span)
        timings = work.timings
        at = work.ended - _nanoseconds(timings.total)
        parts = (("tokenize", timings.tokenization), ("queue", timings.queue), ("inference", timings.inference))
        for name, seconds in parts:
            child = self._tracer.start_span(name, context=context, start_time=at)
            at = min(work.ended, at + _nanoseconds(seconds))
            child.end(at)

    def close(self) -> None:
        """Send what is not sent yet, which may take seconds."""
        self._provider.shutdown()


class Traced:
    """ASGI middleware: a span for each POST; what probes and scrapers ask for leaves none."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        status: int | None = None

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        span = self._tracing.begin(scope)
        try:
            await self._app(scope, receive, answer)
        finally:
            self._tracing.end(span, scope, status)


def check_installed(endpoint: str | None) -> None:
    """Say that OpenTelemetry is missing, where a flag asks for it; for who is about to load models for minutes.

    Raises:
        MissingExtraError: ``endpoint`` is given, and OpenTelemetry is not installed.
    """
    if endpoint:
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: {_ADVICE}") from error


def tracing_of(endpoint: str | None, environ: Mapping[str, str]) -> Tracing | None:
    """Tracing to an OTLP endpoint over HTTP, if one is named.

    Args:
        endpoint: A URL, ``http://collector:4318/v1/traces``; goes before what the environment says.
        environ: ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_ENDPOINT``; OpenTelemetry's other
            variables (``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, headers) are read by its SDK.

    Raises:
        MissingExtraError: ``endpoint`` is given, and OpenTelemetry is not installed. Without it the environment may
            be meant for somebody else: then there is a line in the log.
    """
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    if not endpoint and variable is None:
        return None
    check_installed(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("%s is set, and OpenTelemetry is not installed, so there are no traces: %s", variable, _ADVICE)
        return None
    # Without an argument the exporter reads the variables by itself.
    exporter = OTLPSpanExporter(endpoint=endpoint) if endpoint else OTLPSpanExporter()
    return Tracing(BatchSpanProcessor(exporter))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
