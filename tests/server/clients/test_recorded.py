"""Databases and programs that ask: their recorded requests are answered with the engine's vectors and scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.server.clients.recorded import DOCUMENTS, EMBEDDER, KEY, PAGE, QUERY, RECORDED, RERANKER, TEXTS, Recorded

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app

Served = tuple[TestClient, dict[str, Engine]]
each_request = pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each.product)


@pytest.fixture(scope="module")
def served(prompted: Path, cross_encoder: Path) -> Iterator[Served]:
    """The server that the page starts: an embedder and a reranker with their names, and a key."""
    folders = {EMBEDDER: prompted, RERANKER: cross_encoder}
    configs = [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    models = ServedModels.load(configs)
    with TestClient(create_app(models, ServerConfig(api_keys=(KEY,)))) as client:
        yield client, {model.name: model.engine for model in models}


def expected(engines: dict[str, Engine], recorded: Recorded) -> Any:
    if recorded.kind == "scores":
        return engines[RERANKER].score([QUERY], DOCUMENTS, **recorded.options).scores
    prompt = {} if "role" in recorded.options else {"prompt": ""}
    return engines[EMBEDDER].embed(TEXTS, **prompt, **recorded.options).embeddings


@each_request
def test_the_product_reads_the_engines_numbers(served: Served, recorded: Recorded) -> None:
    client, engines = served
    answer = client.post(recorded.path, content=json.dumps(recorded.body), headers=dict(recorded.headers))
    assert answer.status_code == 200, answer.text
    numbers = np.array(recorded.read(answer.json()))
    np.testing.assert_allclose(numbers, expected(engines, recorded), atol=2e-6)
    assert np.abs(numbers - numbers[::-1]).max() > 1e-4  # in another order they would differ


@each_request
def test_without_the_key_nothing_is_read(served: Served, recorded: Recorded) -> None:
    headers = {**recorded.headers, "Authorization": "Bearer other"}
    answer = served[0].post(recorded.path, content=json.dumps(recorded.body), headers=headers)
    assert answer.status_code == 401


def test_the_prompts_of_elasticsearchs_input_types_differ(served: Served) -> None:
    vectors = [
        np.array(each.read(served[0].post(each.path, json=each.body, headers=dict(each.headers)).json()))
        for each in RECORDED
        if each.product.endswith((": search", ": ingest"))
    ]
    assert len(vectors) == 2
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_dify_checks_its_models_with_a_word_and_two_documents(served: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    ping = served[0].post("/v1/embeddings", json={"input": "ping", "model": EMBEDDER}, headers=headers)
    assert (ping.status_code, ping.json()["model"]) == (200, EMBEDDER)
    body = {"model": RERANKER, "query": "a?", "documents": ["b", "c"], "top_n": None, "return_documents": True}
    assert len(served[0].post("/v1/rerank", json=body, headers=headers).json()["results"]) == 2


def test_an_embedders_ranking_is_not_read_by_elasticsearch(prompted: Path) -> None:
    """The line of docs/doors.toml: hugging_face takes rankings of cross-encoders only."""
    (recorded,) = [each for each in RECORDED if each.product == "Elasticsearch's hugging_face: scores"]
    models = ServedModels.load([ModelConfig(model=str(prompted), names=(EMBEDDER,), dtype="float32")])
    with TestClient(create_app(models)) as client:
        answer = client.post(recorded.path, json=recorded.body)
        with pytest.raises(AssertionError, match="method"):
            recorded.read(answer.json())


def test_the_page_names_every_product() -> None:
    for recorded in RECORDED:
        assert recorded.product.partition(":")[0].split()[0].removesuffix("'s") in PAGE
