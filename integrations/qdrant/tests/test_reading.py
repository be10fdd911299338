"""Rows read back, aliases, and hybrid search in local mode and by the frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from qdrant_client import QdrantClient, models
from tests.tiny.heads import write_splade

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Chunking, Record, ingest, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract

FORMS = ["plain", "langchain", "llama_index"]


@pytest.fixture
def client() -> QdrantClient:
    return QdrantClient(":memory:")


@pytest.fixture(scope="module")
def sparse_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_splade(tmp_path_factory.mktemp("sparse") / "splade")
    with Engine(str(folder), dtype="float32", device="cpu") as engine:
        yield engine


def fill(engine: Engine, sink: QdrantSink, records: list[Record], **options: Any) -> None:
    report = ingest(records, engine=engine, sink=sink, show_progress=False, **options)
    assert report.failed == 0


def test_a_scan_goes_on_page_by_page(
    engine: Engine, client: QdrantClient, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64])
    fill(engine, sink, records[:1])
    assert list(sink.scan()) == [(point_id("doc-0"), "doc-0")]
    fill(engine, sink, records)
    for size in (1, 5, 6, 12, 13):  # the last page full or not
        monkeypatch.setattr("millpond_qdrant.driver._SCANNED", size)
        assert sorted(record_id for _, record_id in sink.scan()) == sorted(record.id for record in records)
    rows = sink.scan()
    next(rows)
    sink.delete(["doc-3"])  # between two pages
    assert len({row_id for row_id, _ in rows}) in (10, 11)
    sink.delete([record.id for record in records])
    assert list(sink.scan()) == []


STRAYS: list[tuple[int | str, dict[str, Any]]] = [
    (7, {"page_content": "of LangChain", "metadata": {"id": "not this", "doc_id": "nor this"}}),
    (18446744073709551615, {"text": "of nobody's", "metadata": {}}),
    (
        "9b2f8b3e-6f5a-4b57-8f52-0c8b1a0d9a11",
        {"_node_content": "{}", "_node_type": "TextNode", "doc_id": "a document", "id": "its metadata", "chunk": 3},
    ),
    ("00000000-0000-0000-0000-000000000000", {}),
    (8, {"id": "doc-0", "text": "of somebody who also writes an id", "metadata": {}}),
]


@pytest.mark.parametrize("form", FORMS)
def test_points_of_others_are_their_own_records(
    engine: Engine, client: QdrantClient, records: list[Record], form: str
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64], fields=form)
    fill(engine, sink, records)
    vector = {"d64": [1.0] + [0.0] * 63}
    client.upsert("docs", [models.PointStruct(id=id, vector=vector, payload=payload) for id, payload in STRAYS])
    found = dict(sink.scan())
    for id, _ in STRAYS:
        assert found.pop(str(id)) == str(id)
    assert found == {point_id(record.id): record.id for record in records}
    rows = sink.fetch([str(id) for id, _ in STRAYS], widths=[64])
    assert {row_id: (row.record_id, row.content_hash) for row_id, row in rows.items()} == {
        str(id): (str(id), "") for id, _ in STRAYS
    }
    assert all(row.vectors[64][0] == 1 for row in rows.values())
    sink.delete_rows([str(id) for id, _ in STRAYS])
    assert sink.count() == len(records)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_rows_of_their_parent(engine: Engine, client: QdrantClient, form: str) -> None:
    text = " ".join(f"Sentence {n} tells of rivers, mills and ponds." for n in range(40))
    sink = QdrantSink(client, "docs", fields=form)
    records = [Record("long", text, {"lang": "en"}), Record("short", "Tides follow the moon.")]
    fill(engine, sink, records, chunking=Chunking(max_tokens=40))
    rows = dict(sink.scan())
    chunks = sum(record_id == "long" for record_id in rows.values())
    assert chunks > 5 and sorted(set(rows.values())) == ["long", "short"]
    assert {row_id for row_id, record_id in rows.items() if record_id == "long"} == {
        point_id("long", chunk) for chunk in range(chunks)
    }
    hit = sink.search(engine, "Sentence 31 tells", k=1, filter={"lang": "en"})[0]
    assert hit.id == "long" and text[hit.metadata["chunk_start"] : hit.metadata["chunk_end"]] == hit.text
    sink.delete(["long"])
    assert dict(sink.scan()) == {point_id("short"): "short"}


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QdrantClient]:
    client = QdrantClient(":memory:") if request.param == "memory" else QdrantClient(path=str(tmp_path))
    yield client
    client.close()


def test_an_alias_names_the_rebuilt_collection_for_every_reader(
    engine: Engine, place: QdrantClient, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = QdrantSink(place, "docs-1", dimensions=[64])
    fill(engine, first, records[:4])
    assert first.swap_alias("docs") is None
    reader = QdrantSink(place, "docs")
    assert reader.count() == 4 and len(reader.search(engine, "tides", k=20)) == 4
    second = QdrantSink(place, "docs-2", dimensions=[64])
    fill(engine, second, records)
    assert reader.count() == 4
    sent: list[list[Any]] = []
    change = place.update_collection_aliases
    monkeypatch.setattr(
        place, "update_collection_aliases", lambda operations: sent.append(operations) or change(operations)
    )
    assert second.swap_alias("docs") == "docs-1"
    assert [type(operation).__name__ for operation in sent[0]] == ["DeleteAliasOperation", "CreateAliasOperation"]
    assert len(sent) == 1  # which a server does in one step
    assert reader.count() == 12 and len(reader.search(engine, "tides", k=20)) == 12
    assert dict(reader.scan()).keys() == {point_id(record.id) for record in records}
    assert second.swap_alias("docs", delete_former=True) == "docs-2"  # itself, which stays
    assert place.collection_exists("docs-1") and reader.count() == 12
    assert first.swap_alias("docs", delete_former=True) == "docs-2"
    assert not place.collection_exists("docs-2") and reader.count() == 4
    writer = QdrantSink(place, "docs", dimensions=[64])
    fill(engine, writer, records[:6])
    assert first.count() == 6
    reader.delete(["doc-0"])
    assert first.count() == 5


def test_a_reader_by_an_alias_notices_another_model(
    engine: Engine, client: QdrantClient, records: list[Record], minilm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = QdrantSink(client, "docs-1")
    fill(engine, first, records)
    first.swap_alias("docs")
    reader = QdrantSink(client, "docs")
    reader.search(engine, "tides")
    with Engine(minilm, dtype="float32", device="cpu", max_length=64) as other:
        second = QdrantSink(client, "docs-2")
        fill(other, second, records)
        second.swap_alias("docs")
        now = reader._read
        monkeypatch.setattr("millpond.ingest.sinks.reader.time.monotonic", lambda: now + 59)
        reader.search(engine, "tides")
        monkeypatch.setattr("millpond.ingest.sinks.reader.time.monotonic", lambda: now + 61)
        with pytest.raises(FingerprintMismatchError, match="max_length=64"):
            reader.search(engine, "tides")
        with pytest.raises(FingerprintMismatchError, match="max_length=64"):
            fill(engine, QdrantSink(client, "docs"), records)
        assert reader.search(other, records[9].text, k=1)[0].id == "doc-9"


def test_an_alias_that_cannot_be_is_refused(engine: Engine, client: QdrantClient, records: list[Record]) -> None:
    sink = QdrantSink(client, "docs-1")
    with pytest.raises(InvalidRequestError, match="there is no collection 'docs-1'"):
        sink.swap_alias("docs")
    fill(engine, sink, records)
    for name in ("", "a/b", ".."):
        with pytest.raises(InvalidRequestError, match="is no name for Qdrant"):
            sink.swap_alias(name)
    with pytest.raises(InvalidRequestError, match="alias='docs-1' is the name of a collection"):
        sink.swap_alias("docs-1")
    vectors = {"d4": models.VectorParams(size=4, distance=models.Distance.COSINE)}
    client.create_collection("foreign", vectors)
    with pytest.raises(InvalidRequestError, match="alias='foreign' is the name of a collection"):
        sink.swap_alias("foreign")
    operation = models.CreateAlias(collection_name="foreign", alias_name="docs")
    client.update_collection_aliases([models.CreateAliasOperation(create_alias=operation)])
    with pytest.raises(InvalidRequestError, match="names 'foreign', which was not made by millpond; pass delete_form"):
        sink.swap_alias("docs", delete_former=True)
    with pytest.raises(FingerprintMismatchError, match="'docs' was not made by millpond"):
        QdrantSink(client, "docs").search(engine, "tides")
    assert sink.swap_alias("docs") == "foreign" and client.collection_exists("foreign")
    with pytest.raises(InvalidRequestError, match="'docs' is an alias itself, of 'docs-1'"):
        QdrantSink(client, "docs").swap_alias("more")
    sink.swap_alias("more")
    other = QdrantSink(client, "docs-2")
    fill(engine, other, records)
    with pytest.raises(InvalidRequestError, match=r"collection 'docs-1' has the aliases \['more'\] too"):
        other.swap_alias("docs", delete_former=True)
    assert QdrantSink(client, "docs").count() == 12 and client.collection_exists("docs-1")


def fused(*rankings: list[str]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, id in enumerate(ranking, start=1):
            scores[id] = scores.get(id, 0.0) + 1 / (60 + rank)
    return scores


def rankings(
    engine: Engine, sparse_engine: Engine, records: list[Record], question: str, width: int
) -> tuple[list[str], list[str]]:
    """Ids by cosine at a width, and by the dot product of sparse vectors."""
    rows = engine.embed([r.text for r in records], role="document", dimensions=width, normalize=True).embeddings
    scores = rows @ engine.embed([question], role="query", dimensions=width, normalize=True).embeddings[0]
    documents = sparse_engine.sparse_embed([r.text for r in records], role="document").embeddings
    (query,) = sparse_engine.sparse_embed([question], role="query").embeddings
    dots = [sum(query[t] * w for t, w in document.items() if t in query) for document in documents]
    order = range(len(records))
    return (
        [records[row].id for row in sorted(order, key=lambda row: -scores[row])],
        [records[row].id for row in sorted(order, key=lambda row: -dots[row]) if dots[row]],
    )


@pytest.mark.parametrize("condition", [None, {"tags": "a"}], ids=["all", "filtered"])
@pytest.mark.parametrize("dimensions", [[384], [64, 384]], ids=["one-width", "coarse_to_fine"])
def test_a_hybrid_search_is_the_fusion_of_two_rankings(
    engine: Engine,
    sparse_engine: Engine,
    client: QdrantClient,
    records: list[Record],
    condition: dict[str, Any] | None,
    dimensions: list[int],
) -> None:
    sink = QdrantSink(client, "docs", dimensions=dimensions, hybrid=True)
    fill(engine, sink, records, sparse_engine=sparse_engine)
    params = client.get_collection("docs").config.params
    assert params.sparse_vectors is not None and params.sparse_vectors["sparse"].modifier is None
    kept = [record for record in records if condition is None or "a" in record.metadata["tags"]]
    question = "what moves blood around the body?"
    dense, sparse = rankings(engine, sparse_engine, kept, question, 384)
    for candidates in (4, 12):
        coarse, _ = rankings(engine, sparse_engine, kept, question, dimensions[0])
        chosen = [id for id in dense if id in coarse[:candidates]]
        wanted = fused(chosen, sparse[:candidates])
        hits = QdrantSink(client, "docs").search(
            engine,
            question,
            k=4,
            coarse_to_fine=True,
            candidates=candidates,
            filter=condition,
            hybrid=True,
            sparse_engine=sparse_engine,
        )
        assert [hit.id for hit in hits] == sorted(wanted, key=wanted.__getitem__, reverse=True)[:4]
        assert [hit.score for hit in hits] == pytest.approx([wanted[hit.id] for hit in hits], abs=1e-6)
    # The same collection answers by its dense vectors alone.
    hits = sink.search(engine, question, k=3, filter=condition)
    assert [hit.id for hit in hits] == dense[:3]


def test_a_hybrid_search_finds_what_lacks_a_vector(
    engine: Engine, sparse_engine: Engine, client: QdrantClient, records: list[Record]
) -> None:
    sink = QdrantSink(client, "docs", dimensions=[64, 384], hybrid=True)
    fill(engine, sink, records, sparse_engine=sparse_engine)
    row = engine.embed(["tides"], role="document", dimensions=64, normalize=True).embeddings[0].tolist()
    (weights,) = sparse_engine.sparse_embed(["tides"], role="document").embeddings
    only = models.SparseVector(indices=list(weights), values=list(weights.values()))
    client.upsert(
        "docs",
        [
            models.PointStruct(id=1, vector={"d64": row}, payload={"text": "small", "metadata": {}}),
            models.PointStruct(id=2, vector={"sparse": only}, payload={"text": "only sparse"}),
        ],
    )
    hits = sink.search(engine, "tides", k=14, hybrid=True, sparse_engine=sparse_engine)
    assert {hit.text for hit in hits} == {record.text for record in records} | {"small", "only sparse"}
    assert len({hit.id for hit in hits}) == 14


def test_a_question_or_a_text_without_a_weight_has_no_sparse_vector(
    engine: Engine, sparse_engine: Engine, client: QdrantClient, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = QdrantSink(client, "docs", hybrid=True)
    embed = sparse_engine.sparse_embed

    def without(texts: list[str], **options: Any) -> Any:
        output = embed(texts, **options)
        output.embeddings[:] = [{} for _ in texts]
        return output

    fill(engine, sink, records[:6], sparse_engine=sparse_engine)
    monkeypatch.setattr(sparse_engine, "sparse_embed", without)
    hits = sink.search(engine, records[2].text, k=3, hybrid=True, sparse_engine=sparse_engine)
    assert hits[0].id == "doc-2" and [hit.score for hit in hits] == pytest.approx([1 / 61, 1 / 62, 1 / 63])
