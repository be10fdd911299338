"""``/rerank``: the formats of vLLM, Cohere, Jina and TEI with every kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millpond.server.app import create_app
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

QUERY = "How deep is the mill pond?"
DOCUMENTS = [
    "A wheel turns.",
    "The pond is two metres deep.",
    "How deep is the mill pond?",
    "A wheel turns.",  # a tie
    "The miller sells flour.",
]
LONG = "The wheel of the mill turns in the water of the pond. " * 20
PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path, colbert: Path) -> Iterator[ServedModels]:
    folders = {"embedder": embedder, "reranker": cross_encoder, "colbert": colbert}
    served = ServedModels.load(
        [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    )
    yield served
    served.close()


async def post(models: ServedModels, path: str, body: Any, config: ServerConfig | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(models, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://millpond") as client:
        return await client.post(path, json=body)


def engine_of(models: ServedModels, name: str) -> Any:
    return models.find(name, tasks=(), api="").engine


def results_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    return results


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["reranker", "colbert", "embedder"])
async def test_the_order_is_the_engines(models: ServedModels, name: str, path: str) -> None:
    response = await post(models, path, {"model": name, "query": QUERY, "documents": DOCUMENTS})
    expected = engine_of(models, name).rerank(QUERY, DOCUMENTS)
    results = results_of(response)
    assert [each["index"] for each in results] == [each.index for each in expected]
    assert sorted(each["index"] for each in results) == list(range(len(DOCUMENTS)))
    scores = [each["relevance_score"] for each in results]
    np.testing.assert_allclose(scores, [each.relevance_score for each in expected], atol=1e-6)
    assert scores == sorted(scores, reverse=True)
    assert [each["document"] for each in results] == [{"text": DOCUMENTS[each["index"]]} for each in results]
    places = [each["index"] for each in results]
    assert places.index(0) < places.index(3)  # of equal ones, the earlier first
    answer = response.json()
    assert answer["model"] == name
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == expected.usage.prompt_tokens
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert answer["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")


SHAPES = [*((path, "documents") for path in PATHS), ("/rerank", "texts"), ("/v1/rerank", "texts")]


@pytest.mark.parametrize("method", [None, "auto", "cosine", "maxsim"])
@pytest.mark.parametrize(("path", "field"), SHAPES)
async def test_the_method_is_the_engines(models: ServedModels, path: str, field: str, method: Any) -> None:
    body = {"model": "embedder", "query": QUERY, field: DOCUMENTS, "method": method}
    response = await post(models, path, body)
    assert response.status_code == 200, response.text
    content = response.json()
    results = content if field == "texts" else content["results"]
    expected = engine_of(models, "embedder").rerank(QUERY, DOCUMENTS, method=method or "auto")
    assert [each["index"] for each in results] == [each.index for each in expected]
    scores = [each["score" if field == "texts" else "relevance_score"] for each in results]
    np.testing.assert_allclose(scores, [each.relevance_score for each in expected], atol=1e-4)
    assert (scores[0] > 1.1) is (method != "cosine")  # the two measures differ


@pytest.mark.parametrize("field", ["documents", "texts"])
@pytest.mark.parametrize("method", ["dot", "", 1, ["cosine"], "COSINE"])
async def test_an_unknown_method_is_named_with_those_there_are(models: ServedModels, field: str, method: Any) -> None:
    response = await post(models, "/rerank", {"query": QUERY, field: DOCUMENTS, "method": method})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "method")
    assert "should be 'auto', 'cosine' or 'maxsim'" in error["message"]
    assert str(method) in error["message"] or isinstance(method, list)


def test_the_schema_lists_the_methods(models: ServedModels) -> None:
    schemas = create_app(models).openapi()["components"]["schemas"]
    for name in ("RerankRequest", "TeiRerankRequest", "ScoreRequest"):
        (choices,) = [each["enum"] for each in schemas[name]["properties"]["method"]["anyOf"] if "enum" in each]
        assert choices == ["auto", "cosine", "maxsim"]


@pytest.mark.parametrize("field", ["documents", "texts"])
@pytest.mark.parametrize(("name", "method"), [("reranker", "cosine"), ("reranker", "maxsim"), ("colbert", "cosine")])
async def test_a_method_that_the_model_does_not_have(models: ServedModels, field: str, name: str, method: str) -> None:
    response = await post(models, "/rerank", {"model": name, "query": QUERY, field: DOCUMENTS, "method": method})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"method='{method}' compares ")
    assert f" and {name} (" in response.json()["error"]["message"]


@pytest.mark.parametrize(("top_n", "count"), [(None, 5), (0, 5), (1, 1), (2, 2), (50, 5)])
async def test_top_n(models: ServedModels, top_n: int | None, count: int) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    every = results_of(await post(models, "/rerank", body))
    best = results_of(await post(models, "/rerank", {**body, "top_n": top_n}))
    assert [each["index"] for each in best] == [each["index"] for each in every][:count]


@pytest.mark.parametrize(("requested", "repeated"), [(None, True), (True, True), (False, False)])
async def test_documents_are_repeated_unless_they_are_not_wanted(
    models: ServedModels, requested: bool | None, repeated: bool
) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "return_documents": requested}
    assert ["document" in each for each in results_of(await post(models, "/v2/rerank", body))] == [repeated] * 5


@pytest.mark.parametrize(
    ("document", "fields", "text", "repeated"),
    [
        ({"text": "A wheel turns."}, None, "A wheel turns.", {"text": "A wheel turns."}),
        ({"text": "Turns.", "id": 7}, None, "Turns.", {"text": "Turns.", "id": 7}),
        ({"text": "Turns.", "id": [{"a": 1 << 90}]}, None, "Turns.", {"text": "Turns.", "id": [{"a": 1 << 90}]}),
        ({"content": [{"type": "text", "text": "Turns."}]}, None, "Turns.", None),
        ({"title": "Wheel", "text": "It turns.", "year": 9}, ["title", "text"], "Wheel\nIt turns.", None),
        ({"title": "Wheel", "year": 9}, ["year", "title", "author"], "9\nWheel", None),
        ("A wheel turns.", ["title"], "A wheel turns.", {"text": "A wheel turns."}),
    ],
)
async def test_documents_that_are_objects(
    models: ServedModels, document: Any, fields: list[str] | None, text: str, repeated: Any
) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": ["a pond", document], "rank_fields": fields}
    results = {each["index"]: each for each in results_of(await post(models, "/v1/rerank", body))}
    expected = engine_of(models, "reranker").score(QUERY, ["a pond", text]).scores
    np.testing.assert_allclose([results[i]["relevance_score"] for i in (0, 1)], expected, atol=1e-6)
    if repeated is not None:
        assert results[1]["document"] == repeated


async def test_one_document_may_stand_alone(models: ServedModels) -> None:
    for documents in ("A wheel turns.", ["A wheel turns."]):
        body = {"model": "reranker", "query": QUERY, "documents": documents}
        assert [each["index"] for each in results_of(await post(models, "/rerank", body))] == [0]


@pytest.mark.parametrize("path", PATHS)
async def test_over_long_documents(models: ServedModels, path: str) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": [DOCUMENTS[0], LONG]}
    expected = engine_of(models, "reranker").score(QUERY, [DOCUMENTS[0], LONG]).scores
    response = await post(models, path, body)
    if path == "/v2/rerank":  # Cohere's
        results = {each["index"]: each["relevance_score"] for each in results_of(response)}
        np.testing.assert_allclose([results[0], results[1]], expected, atol=1e-6)
        assert (await post(models, path, {**body, "max_tokens_per_doc": 4096})).status_code == 200
    else:
        assert response.status_code == 400
        assert (await post(models, path, {**body, "max_tokens_per_doc": 4096})).status_code == 400
        cut = results_of(await post(models, path, {**body, "truncate_prompt_tokens": 64}))
        results = {each["index"]: each["relevance_score"] for each in cut}
        np.testing.assert_allclose([results[0], results[1]], expected, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
async def test_documents_are_cut_to_so_many_tokens(models: ServedModels, path: str) -> None:
    engine = engine_of(models, "reranker")
    body = {"model": "reranker", "query": QUERY, "documents": [LONG, "pond"], "max_tokens_per_doc": 4}
    results = {each["index"]: each for each in results_of(await post(models, path, body))}
    expected = engine.score(QUERY, engine.truncate_texts([LONG, "pond"], 4)).scores
    np.testing.assert_allclose([results[i]["relevance_score"] for i in (0, 1)], expected, atol=1e-6)
    assert results[0]["document"]["text"] == LONG  # the caller's


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": []}, "At least one text_pair element must be given"),
        ({"documents": ["a"], "top_n": -1}, "top_n"),
        ({"documents": ["a"], "top_n": 1.5}, "top_n"),
        ({"documents": ["a"], "query": ["a", "b"]}, "query"),
        ({"documents": ["a", {"title": "b"}]}, "index 1"),
        ({"documents": ["a", {"title": "b"}], "rank_fields": ["text"]}, "index 1"),
        ({"documents": ["a", {"content": [{"type": "image_url", "image_url": {"url": "b"}}]}]}, "index 1"),
        ({"documents": ["a", 1]}, "documents"),
        ({}, "documents"),
        ({"documents": ["a"], "max_tokens_per_doc": -1}, "must be a non-negative integer"),
    ],
)
async def test_what_cannot_be_ranked_is_refused(models: ServedModels, body: dict[str, Any], message: str) -> None:
    response = await post(models, "/rerank", {"model": "reranker", "query": QUERY, **body})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_the_caller_may_want_logits(models: ServedModels) -> None:
    body = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "use_activation": False}
    results = results_of(await post(models, "/rerank", body))
    expected = engine_of(models, "reranker").score(QUERY, DOCUMENTS, activation=False).scores
    np.testing.assert_allclose([each["relevance_score"] for each in results], np.sort(expected)[::-1], atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raw", [False, True])
async def test_teis_shape(models: ServedModels, path: str, raw: bool) -> None:
    body = {"query": QUERY, "texts": [*DOCUMENTS, LONG], "raw_scores": raw}
    some = ServedModels([models.find(name, tasks=(), api="") for name in ("reranker", "embedder")])
    response = await post(some, path, body)
    assert response.status_code == 200, response.text
    ranked = response.json()
    assert [set(each) for each in ranked] == [{"index", "score"}] * 6
    activation = False if raw else "sigmoid"
    expected = engine_of(models, "reranker").score(QUERY, [*DOCUMENTS, LONG], activation=activation).scores
    np.testing.assert_allclose(
        [each["score"] for each in sorted(ranked, key=lambda each: each["index"])], expected, atol=1e-6
    )
    scores = [each["score"] for each in ranked]
    assert scores == sorted(scores, reverse=True)
    assert raw is not all(0 < score < 1 for score in scores)


async def test_teis_options(models: ServedModels) -> None:
    body = {"model": "reranker", "query": QUERY, "texts": [LONG + "flour", "a pond"], "return_text": True}
    ranked = (await post(models, "/rerank", body)).json()
    assert {each["index"]: each["text"] for each in ranked} == {0: LONG + "flour", 1: "a pond"}
    left = (await post(models, "/rerank", {**body, "truncation_direction": "Left"})).json()
    assert {each["index"]: each["score"] for each in left} != {each["index"]: each["score"] for each in ranked}
    assert (await post(models, "/rerank", {**body, "truncate": False})).status_code == 400
    assert (await post(models, "/rerank", {**body, "texts": []})).status_code == 400
    assert (await post(models, "/rerank", {**body, "texts": "a pond"})).json()["error"]["param"] == "texts"
    several = await post(models, "/rerank", {**body, "model": None})
    assert "several models serve" in several.json()["error"]["message"]
    by_query = await post(models, "/rerank?model=reranker", {**body, "model": None})
    assert [each["index"] for each in by_query.json()] == [each["index"] for each in ranked]
