"""``/score``: every pair of field names, with every kind of model, against the engine's own scores."""

from __future__ import annotations

import json
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
DOCUMENTS = ["The pond is two metres deep.", "A wheel turns.", "How deep is the mill pond?"]
LONG = "The wheel of the mill turns in the water of the pond. " * 20


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path, colbert: Path, classifier: Path) -> Iterator[ServedModels]:
    folders = {"embedder": embedder, "reranker": cross_encoder, "colbert": colbert, "classifier": classifier}
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


def scores_of(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [each["score"] for each in data]


@pytest.mark.parametrize("method", [None, "auto", "cosine", "maxsim"])
async def test_the_method_is_the_engines(models: ServedModels, method: Any) -> None:
    body = {"model": "embedder", "text_1": QUERY, "text_2": DOCUMENTS, "method": method}
    scores = scores_of(await post(models, "/score", body))
    expected = engine_of(models, "embedder").score(QUERY, DOCUMENTS, method=method or "auto").scores
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert (max(scores) > 1.1) is (method == "maxsim")  # auto is the cosine here


async def test_a_method_that_cannot_be_used(models: ServedModels) -> None:
    body = {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS, "method": "cosine"}
    response = await post(models, "/score", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("method='cosine' compares vectors, and reranker (")
    response = await post(models, "/score", {**body, "method": "dot"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "method")
    assert "should be 'auto', 'cosine' or 'maxsim'" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("name", ["reranker", "colbert", "embedder"])
async def test_scores_are_the_engines(models: ServedModels, name: str, path: str) -> None:
    response = await post(models, path, {"model": name, "text_1": QUERY, "text_2": DOCUMENTS})
    expected = engine_of(models, name).score(QUERY, DOCUMENTS)
    np.testing.assert_allclose(scores_of(response), expected.scores, atol=1e-6)
    answer = response.json()
    assert answer["model"] == name
    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == expected.usage.prompt_tokens
    assert len({round(each, 6) for each in scores_of(response)}) == 3  # else the order would prove nothing


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")]
)
@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        (QUERY, DOCUMENTS[0], [(QUERY, DOCUMENTS[0])]),
        ([QUERY], DOCUMENTS, [(QUERY, document) for document in DOCUMENTS]),
        (DOCUMENTS, DOCUMENTS[::-1], list(zip(DOCUMENTS, DOCUMENTS[::-1], strict=True))),
        (
            {"content": [{"type": "text", "text": QUERY}]},
            [{"content": "A wheel turns."}, {"text": DOCUMENTS[0]}],
            [(QUERY, "A wheel turns."), (QUERY, DOCUMENTS[0])],
        ),
    ],
)
async def test_every_spelling(
    models: ServedModels, first: str, second: str, left: Any, right: Any, pairs: list[tuple[str, str]]
) -> None:
    response = await post(models, "/score", {"model": "reranker", first: left, second: right})
    expected = engine_of(models, "reranker").score([q for q, _ in pairs], [d for _, d in pairs]).scores
    np.testing.assert_allclose(scores_of(response), expected, atol=1e-6)


async def test_the_activation_is_the_callers(models: ServedModels) -> None:
    body = {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS}
    engine = engine_of(models, "reranker")
    for field in ("use_activation", "activation", "softmax"):
        raw = scores_of(await post(models, "/score", {**body, field: False}))
        np.testing.assert_allclose(raw, engine.score(QUERY, DOCUMENTS, activation=False).scores, atol=1e-6)
    kept = scores_of(await post(models, "/score", {**body, "model": "embedder", "use_activation": True}))
    np.testing.assert_allclose(kept, engine_of(models, "embedder").score(QUERY, DOCUMENTS).scores, atol=1e-6)


async def test_null_is_what_was_left_out(models: ServedModels) -> None:
    body = {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS}
    nulls = dict.fromkeys(
        ("max_tokens_per_query", "max_tokens_per_doc", "priority", "truncate_prompt_tokens", "softmax")
    )
    actual = scores_of(await post(models, "/score", {**body, **nulls}))
    np.testing.assert_allclose(actual, scores_of(await post(models, "/score", body)), atol=1e-6)


@pytest.mark.parametrize("name", ["reranker", "embedder"])
async def test_over_long_pairs_are_refused_unless_they_may_be_cut(models: ServedModels, name: str) -> None:
    body = {"model": name, "text_1": QUERY, "text_2": [DOCUMENTS[0], LONG]}
    refused = await post(models, "/score", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "BadRequestError"
    cut = scores_of(await post(models, "/score", {**body, "truncate_prompt_tokens": -1}))
    np.testing.assert_allclose(cut, engine_of(models, name).score(QUERY, [DOCUMENTS[0], LONG]).scores, atol=1e-6)


async def test_tokens_of_either_side_are_limited(models: ServedModels) -> None:
    engine = engine_of(models, "reranker")
    limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 5}
    response = await post(models, "/score", {"model": "reranker", "text_1": QUERY, "text_2": [LONG, "pond"], **limits})
    (query,), documents = engine.truncate_texts([QUERY], 3), engine.truncate_texts([LONG, "pond"], 5)
    assert [len(ids) for ids in engine.tokenize([query, *documents], special_tokens=False)][:2] == [3, 5]
    assert documents[1] == "pond"
    assert LONG.startswith(documents[0])
    assert query != QUERY
    np.testing.assert_allclose(scores_of(response), engine.score(query, documents).scores, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_1": [], "text_2": ["a"]}, "At least one text element must be given"),
        ({"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"text_1": "a"}, "text_1 and text_2"),
        ({"queries": "a", "text_2": "b"}, "one is missing"),
        ({"text_1": "a", "text_2": [{"content": [{"type": "image_url"}]}]}, "at index 0"),
        ({"text_1": "a", "text_2": ["b", {"title": "c"}]}, "text_2 has {'title': 'c'} at index 1"),
        ({"text_1": "a", "text_2": 5}, "validation error"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "must be a non-negative integer"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_query": 64}, "must be less than max_model_len"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 65}, "greater than max_model_len"),
        ({"text_1": "a", "text_2": "b", "activation": True, "use_activation": False}, "contradict"),
        ({"text_1": "a", "text_2": "b", "instruction": "Find it"}, "instruction"),
        ({"text_1": "a", "text_2": "b", "chat_template": "{{ messages }}"}, "--trust-request-chat-template"),
        ({"text_1": "a", "text_2": "b", "add_special_tokens": False}, "add_special_tokens"),
        ({"text_1": "a", "text_2": ["b", "\ud800"]}, "Invalid JSON"),
    ],
)
async def test_what_cannot_be_scored_is_refused(models: ServedModels, body: dict[str, Any], message: str) -> None:
    content = json.dumps({"model": "reranker", **body})  # by hand: httpx refuses to send a lone surrogate
    transport = httpx.ASGITransport(create_app(models))
    async with httpx.AsyncClient(transport=transport, base_url="http://millpond") as client:
        response = await client.post("/score", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_a_template_of_the_request(models: ServedModels) -> None:
    template = "Q {{ messages[0].content }} D {{ messages[1].content }}"
    body = {"model": "reranker", "text_1": QUERY, "text_2": DOCUMENTS, "chat_template": template}
    response = await post(models, "/score", body, ServerConfig(trust_request_chat_template=True))
    plain = await post(models, "/score", {**body, "chat_template": None})
    assert not np.allclose(scores_of(response), scores_of(plain), atol=1e-4)


@pytest.mark.parametrize(
    ("served", "name", "status", "message"),
    [
        (("reranker", "embedder"), None, 200, ""),
        (("embedder",), None, 200, ""),
        (("classifier",), None, 501, "The model does not support Score API"),
        (("classifier", "embedder"), "classifier", 501, "The model does not support Score API"),
        (("reranker", "colbert"), None, 400, "name one as model: reranker, colbert"),
        (("reranker",), "other", 404, "The model `other` does not exist."),
    ],
)
async def test_which_model_is_meant(
    models: ServedModels, served: tuple[str, ...], name: str | None, status: int, message: str
) -> None:
    some = ServedModels([models.find(each, tasks=(), api="") for each in served])
    response = await post(some, "/score", {"model": name, "text_1": "a", "text_2": "b"})
    assert response.status_code == status
    if status == 200:
        assert response.json()["model"] == served[0]
    else:
        assert message in response.json()["error"]["message"]


async def test_too_many_documents(models: ServedModels) -> None:
    body = {"model": "reranker", "text_1": "a", "text_2": ["b", "c", "d"]}
    assert (await post(models, "/score", body, ServerConfig(max_inputs=3))).status_code == 200
    refused = await post(models, "/score", body, ServerConfig(max_inputs=2))
    assert refused.status_code == 400
    assert "3 documents" in refused.json()["error"]["message"]
