"""Small requests with large responses: one is refused before its work, several wait for each other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server.errors import RequestError
from millpond.server.requests.response_budget import ResponseBudget, ResultsFullError
from millpond.server.responses.encoding import Base64, LargeResponse, NumberFormat, response_of, to_json

MOST = 20_000
TEXTS = [f"The wheel {i} turns." for i in range(60)]
MODELS = ("embedder", "colbert", "classifier", "token_classifier", "sparse_embedder", "reward_model")


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, indexes: tuple[str, ...]) -> Iterator[TestClient]:
    models = ServedModels.load(
        [ModelConfig(model=str(request.getfixturevalue(name)), names=(name,), dtype="float32") for name in MODELS]
    )
    with TestClient(create_app(models, ServerConfig(indexes=indexes, max_response_bytes=MOST))) as client:
        yield client


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS}, "base64"),
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS * 4, "encoding_format": "base64"}, "fewer texts"),
    ("/v1/embeddings", {"model": "embedder", "input": TEXTS * 4, "encoding_format": "bytes"}, "fewer texts"),
    ("/v1/embeddings", {"model": "colbert", "input": TEXTS}, "fewer or shorter texts"),
    ("/v1/embeddings", {"model": "embedder", "input": [[5, 6]] * 60}, "base64"),
    ("/v2/embed", {"model": "embedder", "texts": TEXTS}, "fewer texts"),
    ("/v2/embed", {"model": "embedder", "texts": TEXTS[:30], "embedding_types": ["float", "base64"]}, "fewer texts"),
    ("/embed", {"model": "embedder", "inputs": TEXTS}, "fewer texts"),
    ("/embed_all", {"model": "embedder", "inputs": TEXTS[:8]}, "fewer or shorter texts"),
    ("/embed_sparse", {"model": "sparse_embedder", "inputs": TEXTS}, "fewer texts"),
    ("/pooling", {"model": "embedder", "task": "token_embed", "input": TEXTS[:8]}, "fewer or shorter texts"),
    ("/pooling", {"model": "token_classifier", "task": "token_classify", "input": TEXTS * 6}, "shorter texts"),
    ("/pooling", {"model": "reward_model", "input": ["a " * 50] * 40}, "shorter texts"),
    ("/classify", {"model": "classifier", "input": TEXTS * 12}, "fewer texts"),
    ("/predict", {"model": "classifier", "inputs": [[text] for text in TEXTS * 3]}, "fewer texts"),
    ("/score", {"model": "colbert", "text_1": TEXTS * 4, "text_2": TEXTS * 4}, "shorter texts"),
    ("/score", {"model": "embedder", "text_1": TEXTS * 3, "text_2": TEXTS * 3, "method": "maxsim"}, "shorter texts"),
    ("/tokenize", {"model": "embedder", "prompt": "a " * 50_000}, "in parts"),
    ("/v1/indexes/docs/search", {"queries": TEXTS * 2, "k": 300}, "fewer hits"),
    ("/v1/indexes/docs/search", {"queries": TEXTS * 5, "k": 1}, "fewer"),
]


@pytest.mark.parametrize(("path", "body", "way_out"), REQUESTS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_small_request_for_a_large_response_is_refused(
    client: TestClient, path: str, body: dict[str, Any], way_out: str
) -> None:
    response = client.post(path, json=body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400, response.text[:300]
    assert re.search(r"about \d+ bytes.* and \d+ is the most .*--max-response-bytes", message), message
    assert way_out in message
    assert client.app.state.response_budget.used == 0  # type: ignore[attr-defined]


def test_what_fits_is_answered(client: TestClient) -> None:
    for path, body, _ in REQUESTS:
        few = {name: value[:2] if isinstance(value, list) else value for name, value in body.items()}
        few |= {name: few[name][:20] for name in ("prompt",) if name in few}
        few |= {"input": ["a b"]} if path == "/pooling" else {}
        few |= {"k": 1} if "k" in few else {}
        few |= {"model": "embedder", "input": TEXTS[:2]} if path == "/v1/embeddings" else {}
        few |= {"inputs": TEXTS[:1]} if path == "/embed_sparse" else {}
        response = client.post(path, json=few)
        assert response.status_code == 200, (path, response.text[:300])
    assert client.app.state.response_budget.used == 0  # type: ignore[attr-defined]


def test_what_an_explanation_compares_is_bounded(embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    with TestClient(create_app(models, ServerConfig(max_response_bytes=5000))) as client:
        assert client.post("/explain", json={"query": "a", "document": "b " * 20}).status_code == 200
        error = client.post("/explain", json={"query": "a " * 50, "document": "b " * 50}).json()["error"]
    assert re.search(r"about \d+ bytes of memory, and 20000 is the most .* shorter query", error["message"])


def test_the_estimate_is_near_the_bytes() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 384)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    form = NumberFormat(encoding="base64")
    sizes = {
        NumberFormat(encoding="float"): len(to_json(rows)),
        form: len(to_json([Base64(rows=row, form=form) for row in rows])),
        NumberFormat(encoding="bytes", dtype="float16"): rows.size * 2,
    }
    for each, size in sizes.items():
        assert size == pytest.approx(rows.size * each.bytes_per_number, rel=0.06)


# --- Many of them at once -------------------------------------------------------------------------------------------


def scope() -> dict[str, Any]:
    return {"type": "http", "state": {}}


def test_results_have_room_together() -> None:
    budget = ResponseBudget(1000)
    with pytest.raises(RequestError, match=r"about 1001 bytes, and 1000 is the most .*: send less"):
        budget.reserve(scope(), size=1001, memory=1, way_out="send less")
    with pytest.raises(RequestError, match=r"about 4001 bytes of memory, and 4000 is the most"):
        budget.reserve(scope(), size=1, memory=4001, way_out="send less")
    first, second = scope(), scope()
    budget.reserve(first, size=1000, memory=3000, way_out="")
    budget.reserve(first, size=1000, memory=900, way_out="")
    with pytest.raises(ResultsFullError, match=r"3900 bytes, this one's would take 101 more, and 4000 is the most"):
        budget.reserve(second, size=1, memory=101, way_out="")
    budget.reserve(second, size=1, memory=100, way_out="")

    async def give_back() -> None:
        budget.give_back(first)
        budget.give_back(second)
        budget.reserve(first, size=1, memory=3, way_out="")  # by a thread that outlives its request
        assert budget.used == 0

    asyncio.run(give_back())


def together(embedder: Path, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """The responses to three requests, of which two have room together; the first waits for its model."""
    monkeypatch.setattr("millpond.server.requests.calls.WAIT_SECONDS", seconds)
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",))])
    app = create_app(models, ServerConfig(max_response_bytes=20_000))  # 80,000 for all, and each takes 36,864
    body = {"input": TEXTS[:32], "model": "tiny"}

    async def talk() -> list[httpx.Response]:
        budget: ResponseBudget = app.state.response_budget
        held = [scope(), scope()]
        for each in held:
            budget.reserve(each, size=1, memory=36_000, way_out="")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pond") as http:
            waiting = [asyncio.ensure_future(http.post("/v1/embeddings", json=body)) for _ in range(3)]
            if seconds:
                for _ in range(30_000):
                    if budget.waiting == 3:
                        break
                    await asyncio.sleep(0.01)
                for each in held:
                    budget.give_back(each)
            responses = await asyncio.gather(*waiting)
            for each in held:
                budget.give_back(each)
        assert budget.used == 0
        return responses

    try:
        return asyncio.run(talk())
    finally:
        models.close()


def test_requests_wait_for_room(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [response.status_code for response in together(embedder, 60.0, monkeypatch)] == [200] * 3


def test_a_request_that_waited_long_enough_is_told_to_come_back(
    embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for response in together(embedder, 0.0, monkeypatch):
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert "80000 is the most" in response.json()["error"]["message"]


@pytest.mark.parametrize("sizes", [[3_000_000], [700_000] * 5, [2_000_000, 1, 0, 1 << 20, 5], [10] * 300_000])
def test_a_large_body_is_sent_as_fast_as_it_is_read(sizes: list[int]) -> None:
    parts = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    response = response_of(parts, "application/json", {"x-extra": "1"})
    assert isinstance(response, LargeResponse)
    asyncio.run(response({"type": "http"}, send, send))  # type: ignore[arg-type]
    headers = dict(sent[0]["headers"])
    assert headers[b"content-length"] == b"%d" % sum(sizes)
    assert (headers[b"x-extra"], headers[b"content-type"]) == (b"1", b"application/json")
    pieces = [message["body"] for message in sent[1:]]
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) < 2 << 20 and len(pieces) < 10
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(pieces) - 1) + [False]


def test_a_small_body_is_sent_at_once() -> None:
    assert response_of([b"[", b"]"], "application/json").body == b"[]"
