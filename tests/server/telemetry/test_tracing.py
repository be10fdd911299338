"""Spans for OpenTelemetry: their parents, their attributes, and none without configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from millpond.errors import MissingExtraError
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server import app as application
from millpond.server.launch import run
from millpond.server.telemetry.spans import OpenTelemetrySpans
from millpond.server.telemetry.tracing import tracing_of
from millpond.support import heap

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def models(embedder: Path) -> Iterator[ServedModels]:
    config = ModelConfig(model=str(embedder), names=("tiny",), device="cpu", dtype="float32")
    models = ServedModels.load([config])
    yield models
    models.close()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def app(models: ServedModels, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    tracing = OpenTelemetrySpans(SimpleSpanProcessor(spans))
    monkeypatch.setattr(application, "tracing_of", lambda endpoint, environ: tracing)
    return create_app(models)


async def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, **options)


async def embed(app: FastAPI, text: str = "a", **options: Any) -> httpx.Response:
    return await ask(app, "POST", "/v1/embeddings", json={"model": "tiny", "input": text}, **options)


def server_span(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = (span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER)
    return span


async def test_a_request_leaves_a_span_with_its_parts(app: FastAPI, spans: InMemorySpanExporter):
    response = await embed(app, headers={"x-request-id": "mine"})
    root = server_span(spans)
    assert root.name == "POST /v1/embeddings"
    assert dict(root.attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/embeddings",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "gen_ai.request.id": "mine",
        "gen_ai.response.model": "tiny",
        "gen_ai.usage.input_tokens": response.json()["usage"]["prompt_tokens"],
    }
    assert root.parent is None and root.status.status_code is StatusCode.UNSET
    parts = [span for span in spans.get_finished_spans() if span is not root]
    assert [part.name for part in parts] == ["tokenize", "queue", "inference"]
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert times == sorted(times, key=lambda time: time or 0)
    for part in parts:
        assert part.parent is not None and part.parent.span_id == root.context.span_id
        assert part.context.trace_id == root.context.trace_id


async def test_a_trace_is_taken_over(app: FastAPI, spans: InMemorySpanExporter):
    await embed(app, headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"})
    root = server_span(spans)
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.context.trace_state.get("a") == "b"


async def test_a_trace_that_is_not_sampled_leaves_nothing(app: FastAPI, spans: InMemorySpanExporter):
    assert (await embed(app, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})).status_code == 200
    assert spans.get_finished_spans() == ()


async def test_what_did_no_work_has_no_parts(app: FastAPI, spans: InMemorySpanExporter):
    assert (await embed(app, "a " * 1000)).status_code == 400
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET  # the client's fault is no error of the server


async def test_a_failure_is_an_error(app: FastAPI, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(ServedModels, "find", fail)
    assert (await embed(app)).status_code == 500
    assert server_span(spans).status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_leave_no_spans(app: FastAPI, spans: InMemorySpanExporter, path: str):
    assert (await ask(app, "GET", path)).status_code == 200
    assert spans.get_finished_spans() == ()


def test_the_resource_says_whose_spans_they_are(monkeypatch: pytest.MonkeyPatch):
    def name() -> Any:
        spans = InMemorySpanExporter()
        tracing = OpenTelemetrySpans(SimpleSpanProcessor(spans))
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        tracing.end(tracing.begin(scope), scope, 200)
        return spans.get_finished_spans()[0].resource.attributes["service.name"]

    assert name() == "millpond"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pond-7")
    assert name() == "pond-7"


# Where they go.


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The endpoints of sent spans."""
    endpoints: list[str] = []

    def export(exporter: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        endpoints.append(exporter._endpoint)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    return endpoints


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        ("http://127.0.0.1:9/mine", {}, "http://127.0.0.1:9/mine"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/t"}, "http://127.0.0.1:9/t"),
        ("http://127.0.0.1:9/mine", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:8"}, "http://127.0.0.1:9/mine"),
    ],
)
async def test_spans_go_where_they_are_told_to(
    models: ServedModels,
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    environ: dict[str, str],
    expected: str,
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    app = create_app(models, ServerConfig(otlp_traces_endpoint=flag))
    assert (await embed(app)).status_code == 200
    app.state.tracing.close()  # which sends what is left
    assert set(sent) == {expected}


@pytest.mark.contract
def test_nothing_is_imported_unless_somebody_asks():
    # FastAPI itself imports the bare interface.
    code = (
        "import sys; import millpond.server.app; from millpond.server.telemetry.tracing import tracing_of; "
        "assert tracing_of(None, {}) is None; "
        "sys.exit(any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0


ELSEWHERE = """
import asyncio, sys
import httpx
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)

from millpond.server.app import create_app
from millpond.server.settings.config import ModelConfig
from millpond.server.served.models import ServedModels

async def ask(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200

models = ServedModels.load([ModelConfig(model=sys.argv[1], device="cpu", dtype="float32")])
asyncio.run(ask(create_app(models)))
models.close()
sys.exit(len(spans.get_finished_spans()))
"""


@pytest.mark.contract
def test_what_else_in_the_process_is_traced_hears_nothing(embedder: Path):
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(embedder)],
        env={**os.environ, "FASTAPI_OTEL_AUTO_CONFIGURE": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        check=False,
        timeout=250,
    )
    assert run.returncode == 0


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's exporter is not installed."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "millpond.server.telemetry.spans")


@pytest.mark.usefixtures("absent")
def test_a_flag_without_opentelemetry_says_so_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heap, "limit_arenas", lambda: False)  # it would last
    config = ServerConfig(port=0, otlp_traces_endpoint="http://127.0.0.1:9")
    with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[otel\]'"):
        run.serve([ModelConfig(model="nowhere")], config, ready=lambda *_: None)


@pytest.mark.usefixtures("absent")
def test_a_variable_without_opentelemetry_is_for_somebody_else(caplog: pytest.LogCaptureFixture):
    assert tracing_of(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text
