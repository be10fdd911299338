"""/explain: the matches of a query's tokens in a text of the request, for every model with token vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from millpond.late_interaction import MemoryIndex
from millpond.server.served.models import ServedModels

Ask = Callable[..., Any]
QUERY = "How deep is it?"
DOCUMENT = "The pond is deep."


@pytest.fixture(scope="module")
def ask(pool: tuple[ServedModels, TestClient]) -> Ask:
    def ask(status: int = 200, **body: Any) -> Any:
        response = pool[1].post("/explain", json={"model": "colbert", "query": QUERY, "document": DOCUMENT, **body})
        assert response.status_code == status, response.text
        return response.json()

    return ask


@pytest.mark.parametrize("name", ["colbert", "embedder", "prompted", "llm"])
@pytest.mark.parametrize(
    "text", [DOCUMENT, "  池 is deep 🌊, \r\nHow deep? 👩‍🔬 שלום"], ids=["plain", "several scripts"]
)
def test_the_matches_are_those_of_an_index(
    ask: Ask, pool: tuple[ServedModels, TestClient], name: str, text: str
) -> None:
    answer = ask(model=name, document=text)
    with MemoryIndex(pool[0].find(name, tasks=(), api="").engine, codec="float32") as index:
        index.add(["a"], [text])
        matches = index.explain(QUERY, "a")
        (hit,) = index.search([QUERY])[0]
    assert answer["model"] == name
    assert [match["token"] for match in answer["matches"]] == [match.token for match in matches]
    assert [match["score"] for match in answer["matches"]] == pytest.approx([match.score for match in matches])
    assert [(match["start"], match["end"]) for match in answer["matches"]] == [(m.start, m.end) for m in matches]
    assert all(text[match["start"] : match["end"]] == match["text"] for match in answer["matches"])
    assert any(match["text"] for match in answer["matches"])
    assert answer["score"] == pytest.approx(hit.score, abs=1e-5)


def test_the_tokens_of_both_texts_are_counted(ask: Ask, pool: tuple[ServedModels, TestClient]) -> None:
    engine = pool[0].find("embedder", tasks=(), api="").engine
    tokens = engine.token_embed([QUERY, DOCUMENT]).usage.prompt_tokens
    body = {"model": "embedder", "query": QUERY, "document": DOCUMENT}
    response = pool[1].post("/explain", json=body)
    assert response.json()["usage"]["prompt_tokens"] == tokens
    assert response.headers["x-compute-tokens"] == str(tokens)
    assert response.headers["x-compute-characters"] == str(len(QUERY) + len(DOCUMENT))


@pytest.mark.parametrize(("field", "limit"), [("query", 12), ("document", 24)])
def test_an_over_long_text_is_named_or_cut(ask: Ask, field: str, limit: int) -> None:
    long = {field: "deep pond " * 50}
    error = ask(400, **long)["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"the {field} is too long: it has ")
    assert f"this model reads {limit};" in error["message"]
    answer = ask(truncate="end", **long)
    assert answer["truncated"] is True
    if field == "document":
        assert max(match["end"] for match in answer["matches"]) < 120
        cut = ask(truncate="start", **long)
        assert max(match["end"] for match in cut["matches"]) > 380
    assert ask()["truncated"] is False


def test_a_text_of_a_megabyte_is_refused_or_cut(ask: Ask) -> None:
    text = "the deep pond " * 80_000
    assert "at least" in ask(400, document=text)["error"]["message"]
    assert ask(document=text, truncate="end")["truncated"] is True
    assert "most to be tokenized whole" in ask(400, document="a" * ((1 << 21) + 1))["error"]["message"]


def test_null_is_a_missing_field(ask: Ask) -> None:
    assert ask(truncate=None) == ask()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"query": " \u200b"}, 400, "the query is blank"),
        ({"document": "\n"}, 400, "the document is blank"),
        ({"query": None}, 400, "query"),
        ({"query": ["a"]}, 400, "query"),
        ({"document": 5}, 400, "document"),
        ({"truncate": "middle"}, 400, "truncate"),
        ({"documents": ["a"]}, 400, "documents"),
        ({"model": "none"}, 404, "`none`"),
        ({"model": "classifier"}, 501, "Explain API"),
        ({"model": None}, 400, "several models serve the Explain API"),
    ],
    ids=range(10),
)
def test_bad_requests(ask: Ask, body: dict[str, Any], status: int, words: str) -> None:
    assert words in ask(status, **body)["error"]["message"]
