"""The service routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.server import ModelConfig, ServedModels, create_app
from tests.server import conftest


@pytest.fixture(scope="module")
def models(embedder: Path, classifier: Path) -> Iterator[ServedModels]:
    loaded = ServedModels.load(
        [
            ModelConfig(model=str(embedder), names=("org/tiny", "short")),
            ModelConfig(model=str(classifier), names=("judge",), max_model_len=32),
        ]
    )
    yield loaded
    loaded.close()


@pytest.fixture
def ask(models: ServedModels) -> Any:
    app = create_app(models)
    return lambda method, path: asyncio.run(conftest.ask(app, method, path))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("HEAD", "/health"),
        ("HEAD", "/ready"),
    ],
)
def test_a_server_that_works_says_so(ask: Any, method: str, path: str) -> None:
    response = ask(method, path)
    assert response.status_code == 200 and (method == "HEAD" or response.json() == {"status": "ok"})


def test_the_version_is_the_package_s_and_nothing_is_under_way(ask: Any) -> None:
    assert ask("GET", "/version").json() == {"version": version("millpond")}
    assert ask("GET", "/load").json() == {"server_load": 0}


def test_every_name_of_every_model_is_listed(ask: Any, models: ServedModels, embedder: Path) -> None:
    listed = ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/tiny", "short", "judge"]
    tiny, _, judge = listed["data"]
    first = next(iter(models))
    assert tiny == {
        "id": "org/tiny",
        "object": "model",
        "created": first.created,
        "owned_by": "millpond",
        "root": str(embedder),
        "parent": None,
        "max_model_len": 64,
        "tasks": sorted(first.engine.tasks),
        "dimensions": 48,
        "matryoshka": False,
        "matryoshka_dimensions": None,
        "labels": [],
        "score_type": "bi-encoder",
    }
    assert (judge["max_model_len"], judge["dimensions"], len(judge["labels"])) == (32, None, 3)
    assert "classify" in judge["tasks"]


@pytest.mark.parametrize("name", ["org/tiny", "org%2Ftiny", "short", "judge"])
def test_one_model_by_its_name(ask: Any, name: str) -> None:
    assert ask("GET", f"/v1/models/{name}").json()["id"] == name.replace("%2F", "/")


@pytest.mark.parametrize("name", ["tiny", "org", "org/tiny/", "nobody"])
def test_a_model_that_there_is_not(ask: Any, name: str) -> None:
    response = ask("GET", f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": f"The model `{name}` does not exist.",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }


@pytest.mark.torch
def test_a_lost_device_is_said_and_the_rest_serves(embedder: Path, backends: list[Any]) -> None:
    import torch

    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",), device="cpu,cpu", dtype="float32")])
    (model,) = models
    app = create_app(models)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    def ask(method: str, path: str, **body: Any) -> httpx.Response:
        return asyncio.run(conftest.ask(app, method, path, json=body or None))

    def lose(count: int) -> None:
        while len(model.engine.lost_devices) < count:
            model.engine.submit("embed", [f"text {i}" for i in range(50)]).exception(60)

    backends[0].lost = error
    lose(1)
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = ask(method, path)
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        assert "the device cpu is lost (CUDA error: an illegal memory access was encountered)" in message
        assert "restart the process" in message and "more" not in message
    assert ask("HEAD", "/health").status_code == 503
    assert ask("GET", "/ready").status_code == 200  # the other device serves until the server is replaced
    assert ask("POST", "/v1/embeddings", model="tiny", input="a").status_code == 200

    backends[1].lost = error
    lose(2)
    for method, path in (("GET", "/health"), ("GET", "/ready")):
        assert ask(method, path).status_code == 503
    response = ask("POST", "/v1/embeddings", model="tiny", input="a")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert "the device cpu is lost" in response.json()["error"]["message"]
    models.close()
