"""docs/server.md: every curl command works, and its YAML is valid."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from millpond.late_interaction import PlaidIndex
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
COMMANDS = [
    words
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in re.split(r"\n(?=\S)", block.replace("\\\n", ""))
    if (words := shlex.split(line, comments=True)) and words[0] == "curl"
]


KEY = "$MILLPOND_API_KEY"  # as the commands have it, which no shell reads here


@pytest.fixture(scope="module")
def client(
    embedder: Path,
    cross_encoder: Path,
    sparse_embedder: Path,
    classifier: Path,
    nli: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TestClient]:
    """The server of the section "Several models", with tiny models under those names, another, and its index."""
    (line,) = re.findall(r"^millpond serve ((?:\S+/\S+ ?){4})$", PAGE, re.MULTILINE)
    folders = (embedder, cross_encoder, sparse_embedder, classifier, nli)
    names = (*line.split(), "MoritzLaurer/deberta-v3-base-zeroshot-v2.0")
    configs = [
        ModelConfig(model=str(folder), names=(name,), device="cpu") for folder, name in zip(folders, names, strict=True)
    ]
    models = ServedModels.load(configs)
    index = tmp_path_factory.mktemp("docs") / "docs.index"
    with PlaidIndex(index, next(iter(models)).engine) as new:
        new.add(["wheel", "flour"], ["Water turns the wheel.", "The miller sells flour."], [{"year": 1790}, None])
    app = create_app(models, ServerConfig(api_keys=(KEY,), indexes=(f"docs={index}",)))
    # Commands without a key are for servers without one.
    with TestClient(app, base_url="http://localhost:8000", headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def send(client: TestClient, words: list[str]) -> Any:
    url, body, headers = "", None, {}
    rest = iter(words[1:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(rest)
        else:
            url = word
    return client.request("GET" if body is None else "POST", url, content=body, headers=headers)


def test_the_page_has_commands():
    paths = {
        next(word for word in words if word.startswith("http")).removeprefix("http://localhost:8000")
        for words in COMMANDS
    }
    assert {"/v1/embeddings", "/score", "/rerank", "/classify", "/pooling", "/health"} <= paths


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: next(w for w in words if w.startswith("http"))[21:])
def test_every_curl_is_answered(client: TestClient, words: list[str]):
    answer = send(client, words)
    assert answer.status_code == 200, answer.text
    if not words[1].endswith("/metrics"):
        assert json.loads(answer.content)


def test_every_route_has_its_curl(client: TestClient):
    described = client.get("/openapi.json").json()["paths"]
    documented = {path for path in described if path in PAGE}
    assert set(described) - documented <= {"/load", "/v1/models/{name}"}
