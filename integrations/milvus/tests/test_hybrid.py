"""Hybrid search in Milvus Lite, against the same ranking computed with numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.tiny.heads import write_splade

from millpond import Engine, FingerprintMismatchError, InvalidRequestError, UnsupportedTaskError
from millpond.ingest import Record, WriteBatch, ingest, point_id
from millpond_milvus import MilvusSink

pytestmark = pytest.mark.contract

QUESTION = "what moves blood around the body?"
K = 60


@pytest.fixture(scope="session")
def sparse_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("splade")
    write_splade(folder)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


def write(sink: MilvusSink, engine: Engine, sparse_engine: Engine, records: Sequence[Record]) -> WriteBatch:
    sink.prepare(engine.spec, sparse=sparse_engine.spec)
    texts = [record.text for record in records]
    vectors = {
        width: engine.embed(texts, role="document", dimensions=width, normalize=True).embeddings
        for width in sink.dimensions or ()
    }
    sparse = sparse_engine.sparse_embed(texts, role="document")
    batch = WriteBatch(
        records=records, ids=[point_id(record.id) for record in records], vectors=vectors, sparse=list(sparse)
    )
    sink.write(batch)
    return batch


def fused(dense: Sequence[str], sparse: Sequence[str]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for ranking in (dense, sparse):
        for rank, name in enumerate(ranking, start=1):
            scores[name] = scores.get(name, 0) + 1 / (K + rank)
    return scores


def dense_ranking(engine: Engine, batch: WriteBatch, width: int) -> list[str]:
    query = engine.embed([QUESTION], role="query", dimensions=width, normalize=True).embeddings[0]
    order = np.argsort(-(batch.vectors[width] @ query), kind="stable")
    return [batch.records[index].id for index in order]


def sparse_ranking(query: Mapping[int, float], batch: WriteBatch) -> list[str]:
    assert batch.sparse is not None
    scores = [sum(weight * row.get(token, 0) for token, weight in query.items()) for row in batch.sparse]
    order = np.argsort(-np.array(scores), kind="stable")
    return [batch.records[index].id for index in order if scores[index] > 0]


@pytest.mark.parametrize("coarse_to_fine", [True, False])
def test_our_sparse_vectors_are_fused_by_reciprocal_rank(
    engine: Engine, sparse_engine: Engine, records: list[Record], uri: str, coarse_to_fine: bool
) -> None:
    with MilvusSink(uri, "docs", dimensions=[64, 384], hybrid=True) as sink:
        batch = write(sink, engine, sparse_engine, records)
        query = sparse_engine.sparse_embed([QUESTION], role="query")[0]
        expected = fused(dense_ranking(engine, batch, 384), sparse_ranking(query, batch))
        hits = sink.search(
            engine, QUESTION, k=12, hybrid=True, sparse_engine=sparse_engine, coarse_to_fine=coarse_to_fine
        )
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-6)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert len(expected) == 12 and all(hit.text and hit.metadata for hit in hits)
        few = sink.search(engine, QUESTION, k=2, hybrid=True, sparse_engine=sparse_engine, filter={"n": [4, 7, 9]})
        assert len(few) == 2 and {hit.metadata["n"] for hit in few} <= {4, 7, 9}
        plain = sink.search(engine, QUESTION, k=1)
        assert plain[0].id == "doc-4" and plain[0].score > 0.3  # a cosine


def test_a_question_without_tokens_is_ranked_by_its_vector_alone(
    engine: Engine, sparse_engine: Engine, records: list[Record], uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MilvusSink(uri, "docs", dimensions=[384], hybrid=True) as sink:
        batch = write(sink, engine, sparse_engine, records)
        monkeypatch.setattr(sparse_engine, "sparse_embed", lambda texts, **_: [{} for _ in texts])
        hits = sink.search(engine, QUESTION, k=3, hybrid=True, sparse_engine=sparse_engine)
        assert [hit.id for hit in hits] == dense_ranking(engine, batch, 384)[:3]
        assert [hit.score for hit in hits] == pytest.approx([1 / 61, 1 / 62, 1 / 63])


def test_milvus_ranks_the_text_itself_by_bm25(engine: Engine, records: list[Record], uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64, 384], hybrid="bm25") as sink:
        report = ingest([*records, Record("rare", "zymurgy")], engine=engine, sink=sink, show_progress=False)
        assert report.written == 13
        hits = sink.search(engine, "zymurgy", k=1, hybrid=True)
        assert hits[0].id == "rare" and hits[0].score == pytest.approx(2 / 61)
        words = sink.client.search("docs", data=[QUESTION], anns_field="sparse", limit=13, output_fields=["id"])[0]
        lexical = [row["entity"]["id"] for row in words]
        texts = [record.text for record in records] + ["zymurgy"]
        rows = engine.embed(texts, role="document", dimensions=384, normalize=True).embeddings
        query = engine.embed([QUESTION], role="query", dimensions=384, normalize=True).embeddings[0]
        names = [record.id for record in records] + ["rare"]
        dense = [names[index] for index in np.argsort(-(rows @ query), kind="stable")]
        expected = fused(dense, lexical)
        hits = sink.search(engine, QUESTION, k=13, hybrid=True)
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-6)
    with MilvusSink(uri, "docs") as reader:  # that it ranks by BM25 is the collection's, and need not be said
        assert reader.search(engine, "zymurgy", k=1, hybrid=True)[0].id == "rare"


def test_what_a_hybrid_collection_lacks_is_said(
    engine: Engine, sparse_engine: Engine, records: list[Record], uri: str
) -> None:
    with MilvusSink(uri, "plain", dimensions=[64]) as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
        with pytest.raises(InvalidRequestError, match="'plain' holds no sparse vectors"):
            sink.search(engine, QUESTION, hybrid=True, sparse_engine=sparse_engine)
    with (
        MilvusSink(uri, "docs", dimensions=[64], hybrid=True) as sink,
        pytest.raises(UnsupportedTaskError, match="hybrid=True needs sparse vectors"),
    ):
        sink.prepare(engine.spec)
    with MilvusSink(uri, "docs", dimensions=[64], hybrid=True) as sink:
        write(sink, engine, sparse_engine, records)
        with pytest.raises((FingerprintMismatchError, UnsupportedTaskError, InvalidRequestError)):
            sink.search(engine, QUESTION, hybrid=True)  # a model without sparse vectors
    with (
        MilvusSink(uri, "docs", dimensions=[64]) as sink,
        pytest.raises(InvalidRequestError, match="'docs' holds sparse vectors too; pass hybrid=True"),
    ):
        sink.prepare(engine.spec)


@pytest.mark.parametrize("form", ["plain", "langchain", "llama_index"])
def test_rows_of_lite_are_read_back_with_their_chunks_and_those_of_frameworks(
    engine: Engine, uri: str, form: str
) -> None:
    pieces = [
        Record("long", f"piece {n}", {"chunk": n, "chunk_start": n * 7, "chunk_end": n * 7 + 7, "lang": "en"}, chunk=n)
        for n in range(3)
    ]
    texts = [piece.text for piece in pieces]
    vectors = {
        width: engine.embed(texts, role="document", dimensions=width, normalize=True).embeddings for width in (64, 384)
    }
    ids = [point_id("long", n) for n in range(3)]
    with MilvusSink(uri, "docs", dimensions=[64, 384], fields=form) as sink:
        sink.prepare(engine.spec, chunked=True)
        sink.write(WriteBatch(records=pieces, ids=ids, vectors=vectors))
        foreign = {name: vectors[int(name[1:])][0] for name in ("d64", "d384")} | {"text": "theirs"}
        theirs = {
            "plain": {"pk": "own", "id": "own", "metadata": {}, "content_hash": ""},
            "langchain": {"pk": "own", "lang": "sv"},
            "llama_index": {"id": "own", "doc_id": "a document", "_node_content": '{"text": "", "metadata": {}}'},
        }[form]
        sink.client.insert("docs", [foreign | theirs])
        assert dict(sink.scan()) == {**dict.fromkeys(ids, "long"), "own": "own"}
        rows = sink.fetch([*ids, "own", "nobody"], widths=[64, 384])
        assert set(rows) == {*ids, "own"}
        for n, row_id in enumerate(ids):
            assert rows[row_id].record_id == "long" and len(rows[row_id].content_hash) == 64
            for width in (64, 384):
                assert np.allclose(rows[row_id].vectors[width], vectors[width][n], atol=1e-6)
        assert rows["own"].content_hash == "" and rows["own"].record_id == "own"
        hits = sink.search(engine, "piece 2", k=3, filter={"lang": "en"})
        assert {hit.id for hit in hits} == {"long"} and {hit.metadata["chunk"] for hit in hits} == {0, 1, 2}
        sink.delete(["long"])
        assert sink.count() == 1


def test_partitions_of_lite_hold_a_record_once_whatever_its_key(engine: Engine, uri: str) -> None:
    with MilvusSink(uri, "docs", dimensions=[64], partition_key="tenant") as sink:
        for tenant in ("acme", "other"):
            ingest([Record("a", "text", {"tenant": tenant})], engine=engine, sink=sink, show_progress=False)
        assert sink.count() == 1 and len(list(sink.scan())) == 1
        assert sink.search(engine, "text", filter={"tenant": "acme"}) == []
        assert [hit.id for hit in sink.search(engine, "text", filter={"tenant": ["other", "x"]})] == ["a"]
