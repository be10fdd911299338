"""Every route answers what its table says, against the engines themselves."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.server.api.cases import Case, Engines, check
from tests.server.api.cohere_cases import COHERE
from tests.server.api.index_cases import INDEX_CASES
from tests.server.api.ollama_cases import OLLAMA
from tests.server.api.openai_cases import OPENAI
from tests.server.api.rank_cases import RANK
from tests.server.api.tei_cases import TEI
from tests.server.mutations import KEY

from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app

MODELS = (
    "embedder prompted colbert cross_encoder classifier token_classifier reward_model sparse_embedder llm "
    "llm_reranker nli".split()
)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, indexes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, Engines]]:
    folders: dict[str, Path] = {name: request.getfixturevalue(name) for name in MODELS}
    models = ServedModels.load(
        [ModelConfig(model=str(folder), names=(name,), dtype="float32") for name, folder in folders.items()]
    )
    folder = tmp_path_factory.mktemp("copies")  # other tests change the indexes
    copies = tuple(
        f"{name}={shutil.copytree(path, folder / name)}" for name, _, path in (each.partition("=") for each in indexes)
    )
    config = ServerConfig(api_keys=(KEY,), indexes=copies, max_inputs=400)
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine"}
    with TestClient(create_app(models, config), headers=headers) as client:
        yield client, {model.name: model.engine for model in models}


@pytest.mark.parametrize("case", [*OPENAI, *RANK, *COHERE, *TEI, *OLLAMA, *INDEX_CASES], ids=lambda case: case.id)
def test_the_response_is_the_tables(served: tuple[TestClient, Engines], case: Case) -> None:
    client, engines = served
    response = client.get(case.path) if case.body is None else client.post(case.path, json=case.body)
    assert response.status_code == case.status, response.text
    if case.status == 200:
        return check(response.json(), case.same(engines))
    error = response.json()["error"]
    if case.path.startswith("/api/"):  # Ollama's clients read a text
        assert re.search(case.part, error), error
        return
    check(error, {"code": case.status})
    assert re.search(case.part, error["message"]), error["message"]
    assert case.param in (..., error["param"])
    assert "/tmp" not in error["message"]
