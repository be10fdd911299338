"""Spans of requests for OpenTelemetry; imported only where tracing is configured."""

from __future__ import annotations

from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from millpond.server.telemetry.scope import declared_path, request_state, route_path
from millpond.server.telemetry.timings import work_of


class OpenTelemetrySpans:
    """Spans of one application, independent of OpenTelemetry's global provider."""

    def __init__(self, processor: SpanProcessor) -> None:
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence over these names.
        resource = Resource.create({"service.name": "millpond", "service.version": version("millpond")})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("millpond", version("millpond"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> Span:
        """The span of a request, a child of the span in its ``traceparent`` header."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return self._tracer.start_span(
            f"{scope['method']} {route_path(scope)}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )

    def end(self, span: Span, scope: Scope, status: int | None) -> None:
        """End the span; ``status`` is ``None`` if no response was started."""
        state = request_state(scope)
        work = work_of(scope)
        attributes = {
            "http.route": declared_path(scope),
            "http.response.status_code": status,
            "gen_ai.request.id": state.get("request_id"),
            "gen_ai.response.model": state.get("model"),
            "gen_ai.usage.input_tokens": None if work is None else work.tokens,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status is None or status >= 500:
            span.set_status(StatusCode.ERROR)
        if work is not None and span.is_recording():
            context, timings = set_span_in_context(span), work.timings
            start = work.ended - int(timings.total * 1e9)  # nanoseconds
            parts = (("tokenize", timings.tokenization), ("queue", timings.queue), ("inference", timings.inference))
            for name, seconds in parts:  # one after the other; only in the largest calls they overlap
                child = self._tracer.start_span(name, context=context, start_time=start)
                start = min(work.ended, start + int(seconds * 1e9))
                child.end(start)
        span.end()

    def close(self) -> None:
        """Send the remaining spans, which may take seconds."""
        self._provider.shutdown()


def otlp_processor(endpoint: str | None) -> SpanProcessor:
    """Sends spans in batches to ``endpoint``; without it the exporter reads OpenTelemetry's variables."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint) if endpoint else OTLPSpanExporter())
