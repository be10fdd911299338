"""``millpond collections``, and the names in the error of a collection that does not exist, over every database."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import FLOAT32, FORCED, Run

from millpond.ingest import open_sink

DATABASES = {"qdrant": "qdrant+path:{}/q", "milvus": "milvus+file:{}/m.db", "lancedb": "lancedb+path:{}/l"}
SLOWER = [pytest.param(name, marks=pytest.mark.contract) for name in ("milvus", "lancedb", "pgvector")]
LINES = '{"id": "a", "text": "a mill"}\n{"id": "b", "text": "a pond"}\n'


@pytest.fixture(params=["qdrant", *SLOWER])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without collections."""
    pytest.importorskip(f"millpond_{request.param}")
    if request.param == "pgvector":
        return f"pgvector+{request.getfixturevalue('postgres').schema()}"
    return DATABASES[request.param].format(tmp_path)


@pytest.fixture
def fill(run: Run, model: Path, database: str) -> Callable[..., None]:
    def fill(name: str, *words: str) -> None:
        run("ingest", "-", "-m", model, "--to", f"{database}#{name}", *FLOAT32, *words, stdin=LINES, code=0)

    return fill


def test_collections_are_listed_and_shown(run: Run, model: Path, database: str, fill: Callable[..., None]):
    fill("docs", "--dimensions", "8,48", *FORCED)
    fill("cats")
    fill("mats", "--chunk-tokens", "20")
    rows = [line.split("\t") for line in run("collections", "list", database, code=0).out.splitlines()]
    assert [row[:4] for row in rows] == [[name, "2", "vectors", model.name] for name in ("cats", "docs", "mats")]
    assert [row[4] for row in rows] == ["48", "8, 48", "48"]
    listed = json.loads(run("collections", "list", f"{database}#docs", "--format", "json", code=0).out)
    assert listed["url"] == database
    shown = json.loads(run("collections", "show", f"{database}#mats", "--format", "json", code=0).out)
    assert shown == listed["collections"][2]
    assert (shown["rows"], shown["chunked"], shown["dimensions"], shown["datatype"]) == (2, True, [48], "float32")
    assert shown["folder"] == str(model) and shown["sparse"] is None and shown["fields"] == "plain"
    assert len(shown["fingerprint"]) == 64 and shown["settings"]["pooling"] == "mean"
    table = run("collections", "show", f"{database}#mats", code=0).out
    assert f"folder       {model}\n" in table and "chunked      yes\n" in table
    named = run("collections", "show", database, code=2).err
    assert f"choose {database}#cats, {database}#docs, {database}#mats\n" in named


def test_a_missing_collection_is_answered_with_those_that_exist(
    run: Run, model: Path, database: str, fill: Callable[..., None]
):
    fill("boats")
    fill("docs")
    for words in (["search", f"{database}#dcs", "mill"], ["collections", "show", f"{database}#dcs"]):
        err = run(*words, code=2).err
        assert err.startswith("millpond: there is no collection 'dcs' at ")
        assert err.endswith("; it has 'docs', 'boats'; correct the name, or ingest into it first\n")
    sink = open_sink(f"{database}#dcs", must_exist=True)
    with pytest.raises(ValueError, match="it has 'docs', 'boats'"):
        sink.open()  # type: ignore[attr-defined]
    sink.close()


def test_what_millpond_did_not_make_is_listed_as_such(run: Run, tmp_path: Path):
    models = pytest.importorskip("qdrant_client").models
    pytest.importorskip("millpond_qdrant")
    url = DATABASES["qdrant"].format(tmp_path)
    with_client = open_sink(f"{url}#docs")
    vectors = models.VectorParams(size=4, distance=models.Distance.DOT)
    later = {"millpond": {"schema": 99}}
    with_client.client.create_collection("later", vectors_config=vectors, metadata=later)  # type: ignore[attr-defined]
    with_client.client.create_collection("theirs", vectors_config=vectors)  # type: ignore[attr-defined]
    with_client.close()
    done = run("collections", "list", url, code=0)
    assert [line.split("\t")[:3] for line in done.out.splitlines()] == [
        ["later", "", "not readable"],
        ["theirs", "0", "not made by millpond"],
    ]
    assert "was not made by millpond" in run("search", f"{url}#theirs", "mill", code=2).err


def test_a_collection_of_token_vectors_is_shown(run: Run, colbert: Path, tmp_path: Path, engine_of):
    index_class = pytest.importorskip("millpond_qdrant").QdrantIndex
    with index_class(tmp_path / "q", "tokens", engine_of(colbert)) as index:
        index.add(["a"], ["a mill"])
    found = json.loads(run("collections", "show", f"qdrant+path:{tmp_path}/q#tokens", "--format", "json", code=0).out)
    assert (found["kind"], found["model"], found["rows"]) == ("token vectors", colbert.name, 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("qdrant+path:none", "there is no database of Qdrant at 'none'"),
        ("milvus+parquet:none", "'milvus+parquet' only writes"),
        ("none", "'none'... is no URL of a collection"),
        ("ndrant+path:x", "no installed package writes to 'ndrant'"),
    ],
)
def test_what_is_no_database_is_exit_2(run: Run, tmp_path: Path, monkeypatch, url: str, message: str):
    monkeypatch.chdir(tmp_path)
    for verb in ("list", "show"):
        assert message in run("collections", verb, url, code=2).err and not list(tmp_path.iterdir())


def test_an_empty_database_says_so(run: Run):
    done = run("collections", "list", "qdrant+memory:", code=0)
    assert done.out == "" and "there is no collection at qdrant+memory:" in done.err
