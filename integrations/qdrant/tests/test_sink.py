"""Qdrant only: locations, names, filters, and the folder's write-ahead log. The rest is in the contract tests."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from qdrant_client import QdrantClient, models

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Record, SinkError, ingest, open_sink, point_id
from millpond_qdrant import QdrantSink, sink_from_url


def fill(engine: Engine, sink: QdrantSink, records: list[Record]) -> None:
    ingest(records, engine=engine, sink=sink, show_progress=False)


def test_vectors_are_named_by_width_and_the_collection_marked(engine: Engine, records: list[Record]) -> None:
    client = QdrantClient(":memory:")
    fill(engine, QdrantSink(client, "docs", dimensions=[384, 128]), records)
    config = client.get_collection("docs").config
    assert isinstance(config.params.vectors, dict)
    assert {name: (v.size, v.distance) for name, v in config.params.vectors.items()} == {
        "d128": (128, models.Distance.COSINE),
        "d384": (384, models.Distance.COSINE),
    }
    assert config.metadata is not None
    assert config.metadata["millpond"]["fingerprint"] == engine.spec.fingerprint
    (point, *_), _ = client.scroll("docs")
    assert point.payload is not None and sorted(point.payload) == ["content_hash", "id", "metadata", "text"]


def test_the_manifest_is_stored_as_this_metadata(engine: Engine) -> None:
    client = QdrantClient(":memory:")
    QdrantSink(client, "docs", dimensions=[384, 64], fields="langchain").prepare(engine.spec)
    stored = {
        "schema": 1,
        "fingerprint": engine.spec.fingerprint,
        "model": "model",
        "dimensions": [64, 384],
        "payload": "langchain",
    }
    identity = {"settings": dict(engine.spec.settings), "folder": engine.spec.name}
    assert client.get_collection("docs").config.metadata == {"millpond": stored | identity}
    widths = {f"d{n}": models.VectorParams(size=n, distance=models.Distance.COSINE) for n in (64, 384)}
    client.create_collection("earlier", widths, metadata={"millpond": stored})
    assert QdrantSink(client, "earlier").search(engine, "anything") == []


@pytest.mark.parametrize("width", [384, 7])
def test_a_foreign_collection_is_left_alone_whatever_its_widths(
    engine: Engine, records: list[Record], width: int
) -> None:
    client = QdrantClient(":memory:")
    client.create_collection("docs", {"d384": models.VectorParams(size=width, distance=models.Distance.COSINE)})
    sink = QdrantSink(client, "docs")
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        fill(engine, sink, records)
    with pytest.raises(FingerprintMismatchError, match="was not made by millpond"):
        sink.search(engine, "anything")
    assert client.count("docs").count == 0


def test_a_folder_commits_to_a_write_ahead_log(engine: Engine, records: list[Record], tmp_path: Path) -> None:
    with QdrantSink(tmp_path, "docs") as sink:
        fill(engine, sink, records)
        (file,) = tmp_path.rglob("*.sqlite")
        other = sqlite3.connect(file)  # as another process would see it, before the sink is closed
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert other.execute("SELECT count(*) FROM points").fetchone() == (12,)
        other.close()
        # After a crash: the database file alone has every acknowledged row.
        (tmp_path / "crashed.sqlite").write_bytes(file.read_bytes())
        sink.delete(["doc-0", "doc-1"])
        (tmp_path / "deleted.sqlite").write_bytes(file.read_bytes())
    for name, count in (("crashed", 12), ("deleted", 10)):
        copy = sqlite3.connect(tmp_path / f"{name}.sqlite")
        assert copy.execute("SELECT count(*) FROM points").fetchone() == (count,)
        copy.close()


def test_a_native_filter_is_passed_on(engine: Engine, records: list[Record]) -> None:
    sink = QdrantSink(":memory:", "docs", dimensions=[64, 384])
    fill(engine, sink, records)
    below = models.Filter(must=[models.FieldCondition(key="metadata.n", range=models.Range(lt=3))])
    assert {hit.id for hit in sink.search(engine, "anything", filter=below)} == {"doc-0", "doc-1", "doc-2"}
    wrong = models.Filter(must=[models.FieldCondition(key='"', match=models.MatchValue(value=1))])
    with pytest.raises(SinkError, match="refused a search"):
        sink.search(engine, "anything", filter=wrong)


N_BELOW_3 = models.FieldCondition(key="metadata.n", range=models.Range(lt=3))


@pytest.mark.parametrize(
    "filter",
    [
        models.Filter(),
        models.Filter(must=[models.Filter()]),
        models.Filter(must=models.Filter(should=[models.Filter(must=[])])),
        models.Filter(should=[N_BELOW_3, models.Filter()]),
        models.Filter(min_should=models.MinShould(conditions=[models.Filter()], min_count=1)),
        models.Filter(min_should=models.MinShould(conditions=[models.Filter(), N_BELOW_3], min_count=1)),
    ],
    ids=lambda filter: filter.model_dump_json(exclude_none=True),
)
def test_a_native_filter_without_a_condition_deletes_nothing(
    engine: Engine, records: list[Record], filter: models.Filter
) -> None:
    sink = QdrantSink(":memory:", "docs", dimensions=[64])
    fill(engine, sink, records)
    assert len(sink.search(engine, "anything", k=20, filter=filter)) in (0, 12)  # so it would have deleted all or none
    with pytest.raises(InvalidRequestError, match="has no condition and would delete every record"):
        sink.delete(filter=filter)
    assert sink.count() == 12


@pytest.mark.parametrize(
    ("filter", "left"),
    [
        (models.Filter(must=[N_BELOW_3]), 9),
        (models.Filter(should=[N_BELOW_3]), 9),
        (models.Filter(must_not=[N_BELOW_3]), 3),
        (models.Filter(must=[models.Filter(), models.Filter(must_not=[N_BELOW_3])]), 3),
        (models.Filter(min_should=models.MinShould(conditions=[N_BELOW_3], min_count=1)), 9),
        (models.Filter(min_should=models.MinShould(conditions=[models.Filter(), N_BELOW_3], min_count=2)), 9),
        (models.Filter(must=[models.HasIdCondition(has_id=[])]), 12),
    ],
    ids=lambda value: value.model_dump_json(exclude_none=True) if isinstance(value, models.Filter) else str(value),
)
def test_a_native_filter_with_a_condition_deletes_what_it_matches(
    engine: Engine, records: list[Record], filter: models.Filter, left: int
) -> None:
    sink = QdrantSink(":memory:", "docs", dimensions=[64])
    fill(engine, sink, records)
    sink.delete(filter=filter)
    assert sink.count() == left


@pytest.mark.parametrize(
    ("form", "payload"),
    [
        ("llama_index", {"_node_content": "{broken", "doc_id": "x"}),
        ("llama_index", {"other": 1}),
        ("langchain", {"page_content": "x", "metadata": "no dict"}),
    ],
)
def test_a_foreign_point_that_cannot_be_read_is_not_blamed_on_the_database(
    engine: Engine, records: list[Record], form: str, payload: dict[str, object]
) -> None:
    client = QdrantClient(":memory:")
    sink = QdrantSink(client, "docs", dimensions=[384], fields=form)
    fill(engine, sink, records)
    point = point_id("foreign")
    row = engine.embed(["a stray text"], role="document", normalize=True).embeddings[0]
    client.upsert("docs", points=[models.PointStruct(id=point, vector={"d384": row.tolist()}, payload=payload)])
    with pytest.raises(
        SinkError, match=f"'docs' holds the point '{point}', whose fields do not have the layout"
    ) as caught:
        sink.search(engine, "a stray text", k=1)
    assert "Qdrant at" not in str(caught.value) and caught.value.__cause__ is not None
    assert len(sink.search(engine, "a stray text", k=12, filter={"lang": "en"})) == 12


def test_a_key_with_a_quote_or_backslash_is_refused(engine: Engine) -> None:
    sink = QdrantSink(":memory:", "docs", dimensions=[64])
    fill(engine, sink, [])
    for key, sign in (('a"b', "quote"), ("a\\b", "backslash")):
        with pytest.raises(InvalidRequestError, match=f"holds a {sign}"):
            sink.search(engine, "anything", filter={key: 1})


@pytest.mark.parametrize("value", [-(2**53), 2**63 - 1])
def test_integers_that_floats_confuse_are_matched_exactly(engine: Engine, value: int) -> None:
    sink = QdrantSink(":memory:", "docs")
    fill(engine, sink, [Record("a", "x", {"n": value}), Record("b", "y", {"n": value - 1})])
    assert [hit.id for hit in sink.search(engine, "x", filter={"n": value})] == ["a"]


@pytest.mark.parametrize(
    ("scheme", "location", "shown"),
    [
        ("memory", "", "':memory:'"),
        ("http", "//127.0.0.1:6333", "'http://127.0.0.1:6333'"),
        ("https", "//host", "'https://host'"),
    ],
)
def test_urls(scheme: str, location: str, shown: str) -> None:
    with sink_from_url(scheme, location, "docs", dimensions=[64], fields="langchain") as sink:
        assert repr(sink) == f"QdrantSink({shown}, 'docs', dimensions=(64,), fields='langchain')"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:abc", "http://host:99999", "http://a b:1", "https://[::1", "http://"]
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be used .*; write http://host:6333"):
        QdrantSink(url, "docs")


@pytest.mark.parametrize("place", ["~nobody-of-that-name/db", "a\0b", "ftp://host", "grpc://localhost:6334", ""])
def test_invalid_places_are_refused(place: str) -> None:
    with pytest.raises(InvalidRequestError, match="is no place for Qdrant"):
        QdrantSink(place, "docs")


@pytest.mark.parametrize("place", ["localhost", "qdrant:6333", "[::1]:6333/prefix", "user:hunter2@host:6333"])
def test_an_address_is_not_taken_for_a_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for opened in (lambda: QdrantSink(place, "docs"), lambda: open_sink(f"qdrant+path:{place}#docs")):
        with pytest.raises(InvalidRequestError, match="looks like the address of a server.*http://host:6333") as caught:
            opened()
        assert "hunter2" not in str(caught.value) and list(tmp_path.iterdir()) == []
    with open_sink(f"qdrant+path:./{place}#docs"):  # the way out that it names
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "place",
    ["vectors.db", "my/vectors", "C:\\vectors", "c:/vectors", "../db", ".hidden", "a/b:6333"],
)
def test_a_folder_is_still_a_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with QdrantSink(place, "docs"):
        assert Path(place).is_dir()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SinkError, match=r"cannot be opened or made \(Not a directory\)"):
        QdrantSink(tmp_path / "file" / "db", "docs")


@pytest.mark.parametrize(
    "meta", ["{", "[]", "{}", '{"collections": {"a": 1}}', '{"collections": {"docs": {}}, "aliases": {}}']
)
def test_a_folder_of_something_else(tmp_path: Path, meta: str) -> None:
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(SinkError, match="holds no database that this qdrant-client can read"):
        QdrantSink(tmp_path, "docs")
    assert (tmp_path / "meta.json").read_text() == meta


def test_a_damaged_collection(engine: Engine, records: list[Record], tmp_path: Path) -> None:
    with QdrantSink(tmp_path, "docs") as sink:
        fill(engine, sink, records)
    (file,) = tmp_path.rglob("*.sqlite")
    file.write_bytes(b"garbage" * 1000)
    with pytest.raises(SinkError, match="not a database"):
        QdrantSink(tmp_path, "docs")


@pytest.mark.parametrize(("scheme", "location"), [("memory", "x"), ("path", ""), ("http", "host"), ("file", "x")])
def test_urls_of_other_schemes_are_refused(scheme: str, location: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not name a Qdrant"):
        sink_from_url(scheme, location, "docs")
