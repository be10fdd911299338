"""Metrics: counters and histograms for Prometheus, and statistics for the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from importlib.metadata import version
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from millpond.server.served.models import ServedModel, ServedModels
from millpond.server.telemetry.scope import StatusObserver, declared_path, request_state, route_path
from millpond.server.telemetry.throughput import Throughput
from millpond.server.telemetry.timings import work_of
from millpond.values.stats import BatchRun

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TEXTS = tuple(float(1 << power) for power in range(13))
_TOKENS = tuple(float(16 << power) for power in range(14))

# Route label of requests to unknown paths, of which clients can invent any number.
OTHER = "other"
# Statuses that have their own counter.
_REJECTED, _DISCONNECTED = 429, 499

# Values of an engine's statistics: what they are called, the attribute, and a sentence.
_GAUGES = (
    ("waiting_texts", "waiting_texts", "Texts of calls in progress, bounded by max_queue."),
    ("running_calls", "running_calls", "Calls in progress."),
    ("running_batches", "running_batches", "Batches in progress."),
)
_COUNTERS = (
    ("texts", "texts_done", "Texts answered."),
    ("texts_truncated", "texts_truncated", "Texts answered that were cut to the limit of tokens."),
    ("cache_hits", "cache_hits", "Texts found in the vector cache."),
    ("cache_misses", "cache_misses", "Texts not found in the vector cache."),
)

_KEPT_SERIES = 4096


class Metrics:
    """The metrics of one application, in a separate registry, so that a process can have several."""

    def __init__(self, models: ServedModels, *, paths: Collection[str]) -> None:
        self._models = models
        self._paths = frozenset(paths)
        self.registry = CollectorRegistry()
        Info("millpond_build", "Which millpond this is.", registry=self.registry).info({"version": version("millpond")})
        self.in_flight = 0  # requests; changed by the event loop only
        gauge = Gauge("millpond_requests_in_flight", "Requests in progress.", registry=self.registry)
        gauge.set_function(lambda: self.in_flight)
        counter = partial(Counter, labelnames=("route", "model"), namespace="millpond", registry=self.registry)
        histogram = partial(Histogram, namespace="millpond", registry=self.registry)
        timed = partial(histogram, labelnames=("route", "model"), buckets=_SECONDS)
        per_model = partial(histogram, labelnames=("model",))
        self._requests = counter("requests", "Requests answered.", labelnames=("route", "model", "status"))
        self._durations = timed("request_duration_seconds", "From a request's head to the end of its answer.")
        self._rejected = counter("requests_rejected", "Requests answered 429 because the queue was full.")
        self._disconnected = counter("requests_disconnected", "Requests whose client disconnected before the answer.")
        self._tokens = counter("prompt_tokens", "Tokens of the inputs of requests, cached ones included.")
        self._tokenization = timed("request_tokenization_seconds", "Tokenizing a request's texts.")
        self._queue = timed("request_queue_seconds", "From a request's admission to its first batch.")
        self._inference = timed("request_inference_seconds", "While batches with a request's texts ran.")
        self._batch_texts = per_model("batch_texts", "Texts of a batch.", buckets=_TEXTS)
        self._batch_tokens = per_model("batch_tokens", "Tokens of a batch.", buckets=_TOKENS)
        self._batch_seconds = per_model("batch_duration_seconds", "How long a batch took.", buckets=_SECONDS)
        self.registry.register(_EngineCollector(models))
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self.registry)
        # prometheus_client looks a series up by its labels with a lock, of each metric of each request.
        self._labelled = lru_cache(_KEPT_SERIES)(lambda metric, *labels: metric.labels(*labels))
        self._throughput = Throughput()
        self._throughputs = {model.name: Throughput() for model in models}
        self._unsubscribe = [model.engine.observe(self._observer(model)) for model in models]

    def close(self) -> None:
        """Stop observing the engines."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def text(self, accept: str | None = None) -> tuple[bytes, str]:
        """All metrics in the text format that an Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type

    def stats(self) -> dict[str, Any]:
        """The figures of the page at ``/``: queues, and the throughput of the last seconds."""
        return {
            "models": [self._model_stats(model) for model in self._models],
            "requests_per_second": self._throughput.rate("requests"),
            "uptime_seconds": self._throughput.uptime,
        }

    def count(self, scope: Scope, *, status: int | None, seconds: float) -> None:
        """Count a request that has ended; ``status`` is ``None`` if no response was started."""
        route, model = self.route(scope), request_state(scope).get("model", "")

        def of(metric: Any) -> Any:
            return self._labelled(metric, route, model)

        self._labelled(self._requests, route, model, str(status or "none")).inc()
        of(self._durations).observe(seconds)
        if scope["method"] == "POST":
            self._throughput.add(requests=1)
        if status == _REJECTED:
            of(self._rejected).inc()
        if status == _DISCONNECTED:
            of(self._disconnected).inc()
        work = work_of(scope)
        if work is not None:
            of(self._tokens).inc(work.tokens)
            of(self._tokenization).observe(work.timings.tokenization)
            of(self._queue).observe(work.timings.queue)
            of(self._inference).observe(work.timings.inference)

    def route(self, scope: Scope) -> str:
        """The route label of a request: its path as declared, or ``other``."""
        declared = declared_path(scope) or route_path(scope)
        return declared if declared in self._paths else OTHER

    def _observer(self, model: ServedModel) -> Callable[[BatchRun], None]:
        texts, tokens = self._batch_texts.labels(model=model.name), self._batch_tokens.labels(model=model.name)
        seconds, throughput = self._batch_seconds.labels(model=model.name), self._throughputs[model.name]

        def observe(batch: BatchRun) -> None:
            texts.observe(batch.texts)
            tokens.observe(batch.tokens)
            seconds.observe(batch.seconds)
            throughput.add(texts=batch.texts, tokens=batch.tokens)

        return observe

    def _model_stats(self, model: ServedModel) -> dict[str, Any]:
        stats, throughput = model.engine.stats(), self._throughputs[model.name]
        return {
            "name": model.name,
            "tasks": sorted(model.engine.tasks),
            "waiting_texts": stats.waiting_texts,
            "running_calls": stats.running_calls,
            "tokens_per_second": throughput.rate("tokens"),
            "texts_per_second": throughput.rate("texts"),
            "batches": stats.batches,
            "cache": None if model.engine.cache is None else {"hits": stats.cache_hits, "misses": stats.cache_misses},
        }


class MetricsMiddleware:
    """ASGI middleware: counts every request, no matter which route or middleware responds."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        response = StatusObserver(send)
        self._metrics.in_flight += 1
        try:
            await self._app(scope, receive, response)
        finally:
            self._metrics.in_flight -= 1
            self._metrics.count(scope, status=response.status, seconds=time.perf_counter() - start)


class _EngineCollector(Collector):
    """The engines' own statistics, read at each scrape."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        """Empty: no other collector uses these names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current values of every engine."""
        engines = [(model.name, model.engine.stats()) for model in self._models]
        model_info = GaugeMetricFamily("millpond_model_info", "The models.", labels=("model", "device", "dtype"))
        for model in self._models:
            model_info.add_metric((model.name, model.engine.device, model.engine.dtype), 1)
        yield model_info
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, attribute, description in rows:
                family = kind(f"millpond_{name}", description, labels=("model",))
                for model_name, stats in engines:
                    family.add_metric((model_name,), getattr(stats, attribute))
                yield family
        labels = ("model", "outcome")
        calls = CounterMetricFamily("millpond_calls", "Calls of the engine, by how they ended.", labels=labels)
        for outcome in ("done", "failed", "cancelled", "rejected"):
            for model_name, stats in engines:
                calls.add_metric((model_name, outcome), getattr(stats, f"calls_{outcome}"))
        yield calls
