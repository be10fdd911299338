"""What routes answer depends on the server: its templates, its models, its key, and the locks of its indexes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from tests.server.api.openai_cases import TALK, bare

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app

FOLDERS = "embedder cross_encoder colbert classifier llm".split()


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> Iterator[ServedModels]:
    configs = [
        ModelConfig(model=str(request.getfixturevalue(each)), names=(each,), dtype="float32") for each in FOLDERS
    ]
    served = ServedModels.load(configs)
    yield served
    served.close()


def client(models: ServedModels, *names: str, **settings: Any) -> TestClient:
    """A client of some of the models, which stay open: the application is not started."""
    some = ServedModels([models.find(name, tasks=(), api="") for name in names or FOLDERS])
    return TestClient(create_app(some, ServerConfig(**settings)), raise_server_exceptions=False)


def test_templates(llm: Path) -> None:
    """The server's template precedes the model's, a trusted request's precedes both."""
    own = "{% for part in messages[0]['content'] %}[{{ part['text'] }}]{% endfor %}"
    config = ModelConfig(model=str(llm), dtype="float32", chat_template="{{ messages[0]['content'] }}")
    served = ServedModels.load([config])
    bodies = ({}, {"chat_template": own}, {"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "calm"}})
    with TestClient(create_app(served, ServerConfig(trust_request_chat_template=True))) as trusting:
        answers = [trusting.post("/v1/embeddings", json={"messages": TALK, **body}).json() for body in bodies]
        expected = bare(next(iter(served)).engine, "How deep is it?", "[How deep is it?]", "calm").embeddings
    np.testing.assert_allclose([each["data"][0]["embedding"] for each in answers], expected, atol=1e-6)


def test_a_score_template_of_the_request(models: ServedModels) -> None:
    body = {"text_1": "a", "text_2": "b", "chat_template": "Q {{ messages[0].content }} D {{ messages[1].content }}"}
    trusting = client(models, "cross_encoder", trust_request_chat_template=True)
    scores = [
        trusting.post("/score", json=each).json()["data"][0]["score"]
        for each in (body, {**body, "chat_template": None})
    ]
    assert abs(scores[0] - scores[1]) > 1e-4


@pytest.mark.parametrize(
    ("served", "path", "body", "status", "meant"),
    [
        (("classifier", "embedder"), "/v1/embeddings", {"input": "a"}, 200, "embedder"),
        (("classifier", "embedder"), "/classify", {"input": "a"}, 200, "classifier"),
        (("classifier", "embedder"), "/pooling", {"input": "a", "task": "classify"}, 200, "classifier"),
        (("embedder", "classifier"), "/pooling", {"input": "a"}, 400, "embedder, classifier"),
        (("cross_encoder", "embedder"), "/score", {"text_1": "a", "text_2": "b"}, 200, "cross_encoder"),
        (("embedder",), "/score", {"text_1": "a", "text_2": "b"}, 200, "embedder"),
        (("classifier",), "/score", {"text_1": "a", "text_2": "b"}, 501, "The model does not support Score API"),
        (("cross_encoder", "colbert"), "/score", {"text_1": "a", "text_2": "b"}, 400, "model: cross_encoder, colbert"),
        (("embedder", "cross_encoder"), "/v2/embed", {"texts": ["a"]}, 200, "a"),
    ],
)
def test_which_model_is_meant(
    models: ServedModels, served: tuple[str, ...], path: str, body: Any, status: int, meant: str
) -> None:
    response = client(models, *served).post(path, json=body)
    assert response.status_code == status
    answer = response.json()
    assert meant in (answer["error"]["message"] if status != 200 else answer.get("model", answer.get("texts")))


def test_the_shortest_route_is_guarded_and_the_page_is_not(models: ServedModels) -> None:
    guarded = client(models, "embedder", api_keys=("secret",))
    assert guarded.post("/", json={"inputs": "a"}).status_code == 401
    assert guarded.post("/", json={"inputs": "a"}, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert guarded.get("/").status_code == 200


@pytest.mark.parametrize(("path", "body"), [("add", {"ids": ["a"], "texts": ["b"]}), ("delete", {"ids": ["pond"]})])
def test_a_server_without_a_key_changes_no_index(
    models: ServedModels, indexes: tuple[str, ...], path: str, body: Any
) -> None:
    response = client(models, indexes=indexes[:1]).post(f"/v1/indexes/docs/{path}", json=body)
    assert response.status_code == 403 and "MILLPOND_API_KEY" in response.json()["error"]["message"]


def test_an_index_that_another_process_writes_is_a_503(
    models: ServedModels, indexes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.late_interaction.plaid.storage.lock.WAIT_SECONDS", 0.0)
    folder = Path(indexes[0].partition("=")[2])
    with (folder / "LOCK").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keyed = client(models, indexes=indexes[:1], api_keys=("secret",))
        response = keyed.post(
            "/v1/indexes/docs/delete", json={"ids": ["pond"]}, headers={"Authorization": "Bearer secret"}
        )
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert str(folder) not in response.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["docs"], "NAME=PATH"),
        (["docs="], "NAME=PATH"),
        (["a/b={folder}"], "no name for a route"),
        (["docs={folder}", "docs={folder}"], "two indexes"),
        (["docs={folder}-not-there"], "build it first"),
    ],
)
def test_bad_settings_of_indexes(
    models: ServedModels, indexes: tuple[str, ...], settings: list[str], words: str
) -> None:
    folder = indexes[0].partition("=")[2]
    with pytest.raises(InvalidRequestError, match=words):
        client(models, indexes=[setting.format(folder=folder) for setting in settings])
    with pytest.raises(FingerprintMismatchError, match="was built by"):
        client(models, "embedder", indexes=indexes[:1])
