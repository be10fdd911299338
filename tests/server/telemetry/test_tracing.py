"""Spans for OpenTelemetry: their parents, their attributes, and none without configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from millpond.errors import MissingExtraError
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app, serve
from tests.server import conftest

Spans = list[tuple[str, ReadableSpan]]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ReadableSpan]]:
    """What is sent: (the endpoint, the span)."""
    sent: list[tuple[str, ReadableSpan]] = []

    def export(exporter: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent.extend((exporter._endpoint, span) for span in spans)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    return sent


@pytest.fixture
def app(tiny: ServedModels) -> FastAPI:
    return create_app(tiny, ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9/mine"))


async def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request; its spans are sent."""
    response = await conftest.ask(app, method, path, raises=False, **options)
    app.state.tracing.close()
    return response


async def embed(app: FastAPI, text: str = "a", **options: Any) -> httpx.Response:
    return await ask(app, "POST", "/v1/embeddings", json={"model": "tiny", "input": text}, **options)


def server_span(spans: Spans) -> ReadableSpan:
    (span,) = (span for _, span in spans if span.kind is SpanKind.SERVER)
    return span


async def test_a_request_leaves_a_span_with_its_parts(app: FastAPI, spans: Spans):
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
    parts = [span for _, span in spans if span is not root]
    assert [part.name for part in parts] == ["tokenize", "queue", "inference"]
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert times == sorted(times, key=lambda time: time or 0)
    for part in parts:
        assert part.parent is not None and part.parent.span_id == root.context.span_id
        assert part.context.trace_id == root.context.trace_id


async def test_a_trace_is_taken_over(app: FastAPI, spans: Spans):
    await embed(app, headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"})
    root = server_span(spans)
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.context.trace_state.get("a") == "b"


async def test_a_trace_that_is_not_sampled_leaves_nothing(app: FastAPI, spans: Spans):
    assert (await embed(app, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})).status_code == 200
    assert spans == []


async def test_what_did_no_work_has_no_parts(app: FastAPI, spans: Spans):
    assert (await embed(app, "a " * 1000)).status_code == 400
    ((_, span),) = spans
    assert (span.attributes or {})["http.response.status_code"] == 400
    assert span.status.status_code is StatusCode.UNSET  # the client's fault is no error of the server


async def test_a_failure_is_an_error(app: FastAPI, spans: Spans, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(ServedModels, "find", fail)
    assert (await embed(app)).status_code == 500
    assert server_span(spans).status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_probes_leave_no_spans(app: FastAPI, spans: Spans, path: str):
    assert (await ask(app, "GET", path)).status_code == 200
    assert spans == []


async def test_the_resource_says_whose_spans_they_are(app: FastAPI, tiny: ServedModels, spans: Spans, monkeypatch: Any):
    await embed(app)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pond-7")
    await embed(create_app(tiny, ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9/mine")))
    assert {span.resource.attributes["service.name"] for _, span in spans} == {"millpond", "pond-7"}


# Where they go.


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
    tiny: ServedModels,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    environ: dict[str, str],
    expected: str,
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (await embed(create_app(tiny, ServerConfig(otlp_traces_endpoint=flag)))).status_code == 200
    assert {endpoint for endpoint, _ in spans} == {expected}


@pytest.mark.contract
def test_nothing_is_imported_unless_somebody_asks():
    # FastAPI itself imports the bare interface.
    code = (
        "import sys; from millpond.server import create_app; "
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

from millpond.server import ModelConfig, ServedModels, create_app

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
    monkeypatch.delitem(sys.modules, "millpond.server.telemetry.spans", raising=False)


@pytest.mark.usefixtures("absent")
def test_a_flag_without_opentelemetry_says_so_before_models_are_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conftest.run.heap, "limit_arenas", lambda: False)  # it would last
    config = ServerConfig(port=0, otlp_traces_endpoint="http://127.0.0.1:9")
    with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[otel\]'"):
        serve([ModelConfig(model="nowhere")], config, ready=lambda *_: None)


@pytest.mark.usefixtures("absent")
def test_a_variable_without_opentelemetry_is_for_somebody_else(
    tiny: ServedModels, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert create_app(tiny).state.tracing is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text
