"""/v1/indexes: search and explain for everyone with access, changes only with an API key."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.late_interaction import PlaidIndex
from millpond.server.app import create_app
from millpond.server.served.indexes import ServedIndexes
from millpond.server.served.models import ServedModels
from millpond.server.settings.config import ModelConfig, ServerConfig

TEXTS = ["The pond is two metres deep.", "A wheel turns.", "The miller sells flour.", "Bread is made of flour."]
IDS = ["pond", "wheel", "miller", "bread"]
QUERY = "who sells flour?"
KEY = "secret"


@pytest.fixture(scope="module")
def models(embedder: Path, cross_encoder: Path, colbert: Path) -> Iterator[ServedModels]:
    folders = {"embedder": embedder, "reranker": cross_encoder, "colbert": colbert}
    served = ServedModels.load(
        [ModelConfig(model=str(path), names=(name,), dtype="float32") for name, path in folders.items()]
    )
    yield served
    served.close()


@pytest.fixture
def folder(models: ServedModels, tmp_path: Path) -> Path:
    """An index that the ColBERT built."""
    with PlaidIndex(tmp_path / "docs.index", models.find("colbert", tasks=(), api="").engine) as index:
        index.add(IDS, TEXTS, [{"n": n, "kind": ["odd", "even"][n % 2]} for n in range(4)])
    return tmp_path / "docs.index"


async def call(
    models: ServedModels,
    folder: Path,
    path: str,
    body: Any = None,
    *,
    config: dict[str, Any] | None = None,
    key: str = "",
) -> httpx.Response:
    app = create_app(models, ServerConfig(indexes=(f"docs={folder}",), **(config or {})))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://millpond", headers=headers) as client:
        response = await (client.get(path) if body is None else client.post(path, json=body))
    for served in app.state.indexes:
        served.index.close()
    return response


def result(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def expected(models: ServedModels, folder: Path, **options: Any) -> list[dict[str, Any]]:
    with PlaidIndex(folder, models.find("colbert", tasks=(), api="").engine) as index:
        hits = index.search([QUERY], **options)[0]
    return [
        {"id": hit.id, "score": hit.score, "exact": hit.exact, "text": hit.text, "metadata": hit.metadata}
        for hit in hits
    ]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same hits; a query encoded beside others may be rounded otherwise."""
    assert [hit | {"score": 0} for hit in found] == [hit | {"score": 0} for hit in expected]
    assert [hit["score"] for hit in found] == pytest.approx([hit["score"] for hit in expected], abs=1e-4)


async def test_the_hits_are_those_of_the_index(models: ServedModels, folder: Path) -> None:
    answer = result(await call(models, folder, "/v1/indexes/docs/search", {"query": QUERY, "k": 3}))
    hits = expected(models, folder, k=3)
    assert (answer["index"], answer["model"]) == ("docs", "colbert")
    assert_same(answer["results"], hits)
    assert len(hits) == 3


async def test_several_queries_have_a_list_each(models: ServedModels, folder: Path) -> None:
    body = {"queries": [QUERY, "how deep?"], "k": 2, "exact": True}
    results = result(await call(models, folder, "/v1/indexes/docs/search", body))["results"]
    assert [len(hits) for hits in results] == [2, 2]
    assert_same(results[0], expected(models, folder, k=2, exact=True))
    assert result(await call(models, folder, "/v1/indexes/docs/search", {"queries": []}))["results"] == []


async def test_filter_and_ids(models: ServedModels, folder: Path) -> None:
    for options in ({"filter": {"kind": "even"}}, {"ids": ["pond", "bread", "unknown"]}, {"filter": {"n": [0, 3]}}):
        found = result(await call(models, folder, "/v1/indexes/docs/search", {"query": QUERY, **options}))["results"]
        assert_same(found, expected(models, folder, **options))
        assert len(found) == 2


async def test_an_explanation_has_a_match_for_each_token(models: ServedModels, folder: Path) -> None:
    answer = result(await call(models, folder, "/v1/indexes/docs/explain", {"query": QUERY, "id": "miller"}))
    with PlaidIndex(folder, models.find("colbert", tasks=(), api="").engine) as index:
        matches = index.explain(QUERY, "miller")
    assert [match["token"] for match in answer["matches"]] == [match.token for match in matches]
    assert answer["score"] == pytest.approx(sum(match.score for match in matches))
    for match in answer["matches"]:
        assert answer["text"][match["start"] : match["end"]] == match["text"]


async def test_the_list_of_indexes(models: ServedModels, folder: Path) -> None:
    (info,) = result(await call(models, folder, "/v1/indexes"))["data"]
    assert (info["name"], info["model"], info["documents"]) == ("docs", "colbert", 4)
    assert info["tokens"] > 0 and info["width"] > 0 and info["bytes"] > 0


async def test_add_and_delete_with_the_key(models: ServedModels, folder: Path) -> None:
    config = {"api_keys": (KEY,)}
    body = {
        "ids": ["pond", "new", "blank"],
        "texts": ["The pond is dry.", "A new text.", " "],
        "metadata": [None, {"n": 9}, None],
    }
    answer = result(await call(models, folder, "/v1/indexes/docs/add", body, config=config, key=KEY))
    assert answer == {"index": "docs", "added": 1, "replaced": 1, "blank": 1, "truncated": 0}
    found = result(
        await call(models, folder, "/v1/indexes/docs/search", {"query": "dry", "k": 9}, config=config, key=KEY)
    )["results"]
    assert {hit["id"]: hit["text"] for hit in found}["pond"] == "The pond is dry."
    deleted = await call(models, folder, "/v1/indexes/docs/delete", {"ids": ["new", "gone"]}, config=config, key=KEY)
    assert result(deleted) == {"index": "docs", "deleted": 1}
    deleted = await call(
        models, folder, "/v1/indexes/docs/delete", {"filter": {"kind": "even"}}, config=config, key=KEY
    )
    assert result(deleted)["deleted"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [("add", {"ids": ["a"], "texts": ["b"]}), ("delete", {"ids": ["pond"]})],
    ids=["add", "delete"],
)
async def test_a_server_without_a_key_changes_nothing(models: ServedModels, folder: Path, path: str, body: Any) -> None:
    response = await call(models, folder, f"/v1/indexes/docs/{path}", body)
    assert response.status_code == 403
    assert "MILLPOND_API_KEY" in response.json()["error"]["message"]
    assert len(expected(models, folder, k=9)) == 4


@pytest.mark.parametrize("path", ["search", "add", "delete", "explain"])
async def test_a_wrong_key_is_refused(models: ServedModels, folder: Path, path: str) -> None:
    config = {"api_keys": (KEY,)}
    response = await call(models, folder, f"/v1/indexes/docs/{path}", {}, config=config, key="guess")
    assert response.status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("docs/search", {}, 400, "query or queries"),
        ("docs/search", {"query": "a", "queries": ["a"]}, 400, "query or queries"),
        ("docs/search", {"query": " "}, 400, "blank"),
        ("docs/search", {"query": "a", "k": 0}, 400, "k"),
        ("docs/search", {"query": "a", "k": "3"}, 400, "k"),
        ("docs/search", {"query": "a", "k": 5, "candidates": 2}, 400, "candidates=2"),
        ("docs/search", {"query": "a", "filter": {"n": {"$gt": 1}}}, 400, "filter"),
        ("docs/search", {"query": "a", "top_k": 3}, 400, "top_k"),
        ("other/search", {"query": "a"}, 404, "index `other`"),
        ("docs/explain", {"query": "a", "id": "gone"}, 404, "document `gone`"),
        ("docs/add", {"ids": ["a"], "texts": []}, 400, "1 ids for 0 texts"),
        ("docs/add", {"ids": [""], "texts": ["b"]}, 400, "ids"),
        ("docs/delete", {}, 400, "ids or filter"),
        ("docs/delete", {"filter": {}}, 400, "every document"),
        ("docs/search", {"queries": ["a"] * 3}, 400, "3 queries"),
    ],
    ids=range(15),
)
async def test_bad_requests(models: ServedModels, folder: Path, path: str, body: Any, status: int, words: str) -> None:
    config = {"api_keys": (KEY,), "max_inputs": 2}
    response = await call(models, folder, f"/v1/indexes/{path}", body, config=config, key=KEY)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["docs"], "NAME=PATH"),
        (["docs="], "NAME=PATH"),
        (["a/b={folder}"], "no name for a route"),
        (["docs={folder}", "docs={folder}"], "two indexes"),
        (["docs={folder}-not-there"], "build it first"),
    ],
    ids=["no path", "empty path", "name", "twice", "missing"],
)
def test_bad_settings(models: ServedModels, folder: Path, settings: list[str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ServedIndexes.load([setting.format(folder=folder) for setting in settings], models)


def test_an_index_of_another_model_is_refused(folder: Path, embedder: Path) -> None:
    models = ServedModels.load([ModelConfig(model=str(embedder), dtype="float32")])
    with pytest.raises(FingerprintMismatchError, match="was built by"):
        ServedIndexes.load([f"docs={folder}"], models)
    models.close()


async def test_an_index_that_another_process_writes_is_a_503(
    models: ServedModels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.late_interaction.plaid.storage.lock.WAIT_SECONDS", 0.0)
    with (folder / "LOCK").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        body = {"ids": ["pond"]}
        response = await call(models, folder, "/v1/indexes/docs/delete", body, config={"api_keys": (KEY,)}, key=KEY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert str(folder) not in response.text
