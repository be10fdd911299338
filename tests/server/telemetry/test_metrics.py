"""Telemetry of a server: /metrics, /stats and the timing headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from tests.server.conftest import ask, running, until

HEADERS = (
    "x-compute-type x-compute-time x-compute-characters x-compute-tokens x-total-time x-tokenization-time "
    "x-queue-time x-inference-time"
).split()
TEXTS = ["a river", "a mill at the river", "stones"]


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path) -> Iterator[ServedModels]:
    names = {embedder: ("tiny", "alias"), cross_encoder: ("ranker",)}
    models = ServedModels.load(
        [ModelConfig(model=str(each), names=names[each], device="cpu", dtype="float32") for each in names]
    )
    yield models
    models.close()


@pytest.fixture
async def client(models: ServedModels) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(models)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client
    app.state.metrics.close()


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in parse_text(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; 0 without any."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def labels(self, name: str, label: str) -> set[str]:
        return {s.labels[label] for s in self.samples if s.name == name}


async def scrape(client: httpx.AsyncClient) -> Scrape:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Scrape(response.text)


async def embed(client: httpx.AsyncClient, texts: Sequence[str] = TEXTS, **fields: Any) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"model": "tiny", "input": list(texts), **fields})


# Headers.


async def test_an_answer_tells_where_the_time_went(client: httpx.AsyncClient):
    response = await embed(client)
    assert response.status_code == 200
    values = {name: response.headers[name] for name in HEADERS}
    assert values.pop("x-compute-type") == "cpu"
    numbers = {name: int(value) for name, value in values.items()}
    assert numbers["x-compute-tokens"] == response.json()["usage"]["prompt_tokens"]
    assert numbers["x-compute-characters"] == sum(map(len, TEXTS))
    parts = (numbers[f"x-{part}-time"] for part in ("tokenization", "queue", "inference"))
    assert sum(parts) <= numbers["x-total-time"] == numbers["x-compute-time"]


async def test_what_did_no_work_has_no_timings(client: httpx.AsyncClient):
    for response in (await client.get("/v1/models"), await embed(client, ["a " * 1000])):
        assert not [name for name in HEADERS if name in response.headers]


# Counters.


async def test_requests_are_counted_by_route_model_and_status(client: httpx.AsyncClient):
    tokens = (await embed(client)).json()["usage"]["prompt_tokens"]
    await embed(client, model="alias")
    await embed(client, ["a " * 1000])
    samples = await scrape(client)
    labels = {"route": "/v1/embeddings", "model": "tiny"}
    assert samples.value("millpond_requests_total", **labels, status="200") == 2
    assert samples.value("millpond_requests_total", **labels, status="400") == 1
    assert samples.value("millpond_request_duration_seconds_count", **labels) == 3
    assert samples.value("millpond_prompt_tokens_total", **labels) == 2 * tokens
    for part in ("tokenization", "queue", "inference"):
        assert samples.value(f"millpond_request_{part}_seconds_count", **labels) == 2
        assert samples.value(f"millpond_request_{part}_seconds_sum", **labels) > 0
    assert samples.value("millpond_requests_in_flight") == 1  # the scrape itself


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "a"}, "200"),
        ("/detokenize", {"tokens": [5]}, "200"),
        ("/v1/embeddings", {"input": []}, "400"),
        ("/v2/embed", {"texts": []}, "400"),
        ("/pooling", {"input": []}, "400"),
        ("/score", {"text_1": "a", "text_2": []}, "400"),
        ("/rerank", {"query": "a", "texts": []}, "400"),
        ("/classify", {"input": []}, "400"),
        ("/predict", {"inputs": []}, "400"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
async def test_what_never_reaches_the_engine_is_counted_under_its_model_too(
    client: httpx.AsyncClient, path: str, body: Any, status: str, named: bool
):
    """The same label for every name of the model, and for a request without one."""
    model = "ranker" if path in ("/score", "/rerank", "/classify", "/predict") else "tiny"
    if named or path in ("/tokenize", "/detokenize", "/pooling"):
        body = {**body, "model": "alias" if model == "tiny" else model}
    answer = await client.post(path, json=body)
    assert str(answer.status_code) == status, answer.text
    samples = await scrape(client)
    assert samples.value("millpond_requests_total", route=path, model=model, status=status) == 1


async def test_batches_are_in_the_histograms(client: httpx.AsyncClient, models: ServedModels):
    before = {model.name: model.engine.stats() for model in models}
    await embed(client)
    samples = await scrape(client)
    after = next(iter(models)).engine.stats()
    assert samples.value("millpond_batch_texts_sum", model="tiny") == len(TEXTS)
    assert samples.value("millpond_batch_texts_count", model="tiny") == after.batches - before["tiny"].batches
    assert samples.value("millpond_batch_tokens_sum", model="tiny") == after.batch_tokens - before["tiny"].batch_tokens
    assert samples.value("millpond_batch_duration_seconds_sum", model="tiny") > 0
    assert samples.value("millpond_batch_texts_count", model="ranker") == 0
    assert samples.labels("millpond_batch_texts_count", "model") == {"tiny", "ranker"}  # from the first scrape on
    assert samples.value("millpond_texts_total", model="tiny") == after.texts_done
    assert samples.value("millpond_calls_total", model="tiny", outcome="done") == after.calls_done
    assert samples.value("millpond_waiting_texts", model="tiny") == samples.value("millpond_running_calls") == 0


async def test_labels_are_bounded(client: httpx.AsyncClient):
    for i in range(20):
        await client.get(f"/nowhere/{i}")
        await client.get(f"/v1/models/{i}")
        await client.post("/v1/embeddings", json={"model": f"model-{i}", "input": "a"})
        await client.request(f"ODD{i}", "/v1/embeddings")
    samples = await scrape(client)
    assert samples.labels("millpond_requests_total", "model") == {""}
    assert samples.labels("millpond_requests_total", "route") == {"other", "/v1/models/{name:path}", "/v1/embeddings"}
    assert samples.value("millpond_requests_total", route="other", status="404") == 20
    assert samples.value("millpond_requests_total", route="/v1/embeddings", status="404") == 20


def test_refusals_and_departures_are_counted(held: Any):
    pond = held(max_queue=2)
    with running(pond.models) as address, httpx.Client(base_url=address, timeout=60) as client:

        def scraped() -> Scrape:
            return Scrape(client.get("/metrics").text)

        with httpx.Client(base_url=address, timeout=2) as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post("/v1/embeddings", json={"input": ["a", "b"]})
        until(lambda: pond.cancelled == 1)
        waiting = pond.engine.submit("embed", ["a", "b"])
        assert client.post("/v1/embeddings", json={"input": "c"}).status_code == 429
        stats = client.get("/stats").json()["models"][0]
        running_samples = scraped()
        pond.release()
        waiting.result(60)
        samples = scraped()
    assert running_samples.value("millpond_waiting_texts", model="tiny") == stats["waiting_texts"] == 2
    assert running_samples.value("millpond_running_calls", model="tiny") == stats["running_calls"] == 1
    assert running_samples.value("millpond_running_batches", model="tiny") >= 1
    labels = {"route": "/v1/embeddings", "model": "tiny"}
    assert samples.value("millpond_requests_rejected_total", **labels) == 1
    assert samples.value("millpond_requests_disconnected_total", **labels) == 1
    assert samples.value("millpond_calls_total", outcome="rejected") == 1
    assert samples.value("millpond_calls_total", outcome="cancelled") == 1
    assert samples.value("millpond_waiting_texts") == samples.value("millpond_running_calls") == 0
    assert samples.value("millpond_requests_in_flight") == 1  # the scrape itself


# The page's numbers.


async def test_stats_are_what_the_page_reads(client: httpx.AsyncClient, models: ServedModels):
    await embed(client)
    answer = (await client.get("/stats")).json()
    assert set(answer) == {"models", "requests_per_second", "uptime_seconds"}
    assert answer["requests_per_second"] > 0 and answer["uptime_seconds"] > 0
    tiny, ranker = answer["models"]
    assert (tiny["name"], tiny["tasks"]) == ("tiny", ["embed", "token_embed"])
    assert (tiny["waiting_texts"], tiny["running_calls"], tiny["cache"]) == (0, 0, None)
    assert tiny["tokens_per_second"] > tiny["texts_per_second"] > 0
    assert tiny["batches"] == next(iter(models)).engine.stats().batches
    assert (ranker["name"], ranker["tokens_per_second"], ranker["texts_per_second"]) == ("ranker", 0, 0)


@pytest.mark.parametrize(("path", "status"), [("/stats", 401), ("/metrics", 200)])
async def test_the_page_needs_the_key_and_prometheus_does_not(models: ServedModels, path: str, status: int):
    app = create_app(models, ServerConfig(api_keys=("secret",)))
    assert (await ask(app, "GET", path)).status_code == status
    assert (await ask(app, "GET", path, headers={"Authorization": "Bearer secret"})).status_code == 200
