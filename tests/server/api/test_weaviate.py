"""``--protocol weaviate``: what Weaviate's modules send to its containers, and what they read from the answers.

Their requests are written down from the Go clients (weaviate/weaviate: usecases/modulecomponents/clients/transformers,
modules/reranker-transformers/clients): no Content-Type, and the answer's fields, empty, beside those of the request.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.server.api.cases import DOCUMENTS, LONG, QUERY, TEXTS

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from tests.server.conftest import Held, until

CONFIG = ServerConfig(protocol="weaviate")
PASSAGE = {"pooling_strategy": "masked_mean", "task_type": "passage"}


@pytest.fixture(scope="module")
def served(prompted: Path, cross_encoder: Path) -> Iterator[tuple[TestClient, dict[str, Engine]]]:
    folders = {"prompted": prompted, "cross_encoder": cross_encoder}
    models = ServedModels.load(
        [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    )
    with TestClient(create_app(models, CONFIG)) as client:
        yield client, {model.name: model.engine for model in models}


def vectorized(text: str, config: dict[str, Any]) -> bytes:
    """The body of Weaviate's request for the vector of a text."""
    return json.dumps({"text": text, "dims": 0, "vector": None, "error": "", "config": config}).encode()


@pytest.mark.parametrize("path", ["/vectors", "/vectors/"])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PASSAGE, {"role": "document"}),
        ({"pooling_strategy": "cls", "task_type": "query"}, {"role": "query"}),
        ({"pooling_strategy": "masked_mean"}, {"prompt": ""}),
        ({"task_type": "passage", "dimensions": 16}, {"role": "document", "dimensions": 16}),
    ],
)
def test_a_text_has_the_engines_vector(served: Any, path: str, config: Any, options: Any) -> None:
    client, engines = served
    response = client.post(path, content=vectorized(TEXTS[0], config))
    assert "content-type" not in response.request.headers
    answer = response.json()
    expected = engines["prompted"].embed(TEXTS[:1], **options).embeddings[0]
    np.testing.assert_allclose(answer.pop("vector"), expected, atol=1e-6)
    assert answer == {"text": TEXTS[0], "dim": len(expected)}


def test_the_task_decides_about_the_prompt(served: Any) -> None:
    client, _ = served
    query, passage = (
        client.post("/vectors", content=vectorized(TEXTS[0], {"task_type": task})).json()["vector"]
        for task in ("query", "passage")
    )
    assert np.abs(np.subtract(query, passage)).max() > 1e-3


def test_several_texts_are_the_newer_format(served: Any) -> None:
    client, engines = served
    answer = client.post("/vectors", json={"texts": TEXTS, "config": PASSAGE}).json()
    np.testing.assert_allclose(
        answer["vectors"], engines["prompted"].embed(TEXTS, role="document").embeddings, atol=1e-6
    )
    assert answer["dims"] == 48
    assert client.post("/vectors", json={"texts": [], "config": {}}).json() == {"vectors": [], "dims": 48}


def test_an_overlong_text_is_cut(served: Any) -> None:
    client, engines = served
    vector = client.post("/vectors", content=vectorized(LONG, {})).json()["vector"]
    np.testing.assert_allclose(vector, engines["prompted"].embed([LONG], prompt="").embeddings[0], atol=1e-6)


def test_documents_are_scored_in_their_order(served: Any) -> None:
    client, engines = served
    body = {"query": QUERY, "documents": [*DOCUMENTS, LONG], "property": ""}
    answer = client.post("/rerank", content=json.dumps(body).encode()).json()
    expected = engines["cross_encoder"].score([QUERY], body["documents"]).scores
    assert answer["query"] == QUERY
    assert [each["document"] for each in answer["scores"]] == body["documents"]
    np.testing.assert_allclose([each["score"] for each in answer["scores"]], expected, atol=1e-6)
    assert not np.all(np.diff(expected) < 0)  # else a sorted answer would pass too


def test_one_text_is_scored(served: Any) -> None:
    client, engines = served
    answer = client.post("/rerank", content=json.dumps({"query": QUERY, "property": "Two metres."}).encode()).json()
    expected = engines["cross_encoder"].score([QUERY], ["Two metres."]).scores[0]
    assert answer == {"query": QUERY, "property": "Two metres.", "score": pytest.approx(expected), "scores": None}
    empty = client.post("/rerank", json={"query": QUERY, "documents": []}).json()
    assert empty["scores"] == []


def test_the_server_describes_itself(served: Any) -> None:
    client, _ = served
    for path in ("/.well-known/live", "/.well-known/ready"):
        assert (client.get(path).status_code, client.get(path).content) == (204, b"")
    meta = client.get("/meta").json()
    assert (meta["model_name"], meta["dim"], meta["model_type"]) == ("prompted", 48, "bert")
    assert client.get("/health").status_code == client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/vectors", {"config": PASSAGE}, 400, "pass text or texts"),
        ("/vectors", {"text": "a", "texts": ["b"]}, 400, "pass text or texts"),
        ("/vectors", {"text": "a", "config": {"task_type": "other"}}, 400, "config.task_type"),
        ("/vectors", {"text": "a", "config": {"dimensions": 17}}, 400, "only supports Matryoshka dimensions"),
        ("/vectors", [], 400, "valid dictionary|object"),
        ("/rerank", {"documents": ["a"]}, 400, "query: Field required"),
        ("/v1/embeddings", {"input": "a"}, 404, "Not Found"),
    ],
)
def test_an_error_is_a_text(served: Any, path: str, body: Any, status: int, part: str) -> None:
    answer = served[0].post(path, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert re.search(part, answer.json()["error"])


def test_a_browser_cannot_send_a_form(served: Any) -> None:
    answer = served[0].post("/vectors", content=vectorized("a", {}), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["error"][:11]) == (400, "Unsupported")


def test_concurrent_requests_share_batches(held: Callable[..., Held]) -> None:
    model = held()
    app = create_app(model.models, CONFIG)
    count = 48

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://pond", timeout=60) as client:
            asked = [
                asyncio.create_task(client.post("/vectors", content=vectorized(f"The pond is {i} metres deep.", {})))
                for i in range(count)
            ]
            await asyncio.to_thread(until, lambda: model.waiting == count)
            model.release()
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    texts = [f"The pond is {i} metres deep." for i in range(count)]
    assert [answer.json()["text"] for answer in answers] == texts
    batches = model.engine.stats().batches
    assert batches <= count // 4  # the first has what came first; one text a batch would be 48
    rows = np.array([answer.json()["vector"] for answer in answers])
    np.testing.assert_allclose(rows, model.engine.embed(texts).embeddings, atol=1e-6)
