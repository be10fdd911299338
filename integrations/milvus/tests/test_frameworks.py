"""Collections written by ingest, read by the frameworks' own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond import Engine
from millpond.ingest import Record, ingest, point_id
from millpond_milvus import MilvusSink

pytestmark = pytest.mark.contract

QUESTION = "what moves blood around the body?"


def scores(engine: Engine, records: list[Record], width: int) -> dict[str, float]:
    documents = engine.embed([r.text for r in records], role="document", dimensions=width, normalize=True).embeddings
    query = engine.embed([QUESTION], role="query", dimensions=width, normalize=True).embeddings[0]
    return {record.id: float(score) for record, score in zip(records, documents @ query, strict=True)}


@pytest.mark.parametrize("width", [128, 384])
def test_langchain_reads_its_documents(engine: Engine, records: list[Record], tmp_path: Path, width: int) -> None:
    store_of = pytest.importorskip("langchain_milvus").Milvus
    embeddings = pytest.importorskip("langchain_core.embeddings").Embeddings
    uri = str(tmp_path / "x.db")
    with MilvusSink(uri, "docs", dimensions=[128, 384], fields="langchain") as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)

    class Cut(embeddings):  # type: ignore[misc, valid-type]
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            raise AssertionError("everything is there already")

        def embed_query(self, text: str) -> list[float]:
            row = engine.embed([text], role="query", dimensions=width, normalize=True).embeddings[0]
            return [float(value) for value in row]

    store = store_of(
        Cut(),
        collection_name="docs",
        connection_args={"uri": uri},
        vector_field=f"d{width}",
        enable_dynamic_field=True,
    )
    found = store.similarity_search_with_score(QUESTION, k=12)
    wanted = scores(engine, records, width)
    texts = {record.text: record for record in records}
    assert len(found) == 12
    for document, score in found:
        record = texts[document.page_content]
        assert score == pytest.approx(wanted[record.id], abs=1e-5)
        assert {key: document.metadata[key] for key in record.metadata} == record.metadata
        assert document.metadata["record_id"] == record.id
        assert document.metadata["pk"] == point_id(record.id)
    assert [d.page_content for d in store.similarity_search(QUESTION, k=3, expr="n == 4")] == [records[4].text]
    store.client.close()


def test_llama_index_reads_its_nodes(engine: Engine, records: list[Record], tmp_path: Path) -> None:
    """llama-index-vector-stores-milvus requires an older pymilvus, so this repeats what it does with a row."""
    to_node = pytest.importorskip("llama_index.core.vector_stores.utils").metadata_dict_to_node
    metadata = {"doc_id": "mine", "text": "also mine", "id": 7, "d384": 1, "d": {"e": [1, None]}}
    odd = [*records, Record("doc-x", 'text with "quotes" — ä\n', metadata)]
    with MilvusSink(tmp_path / "x.db", "docs", dimensions=[384], fields="llama_index") as sink:
        ingest(odd, engine=engine, sink=sink, show_progress=False)
        query = engine.embed([QUESTION], role="query", normalize=True).embeddings
        (found,) = sink.client.search("docs", query, anns_field="d384", limit=20, output_fields=["*"])
        by_id = {record.id: record for record in odd}
        wanted = scores(engine, odd, 384)
        assert len(found) == 13
        for row in found:
            entity = row["entity"]
            node = to_node({key: entity[key] for key in ("_node_content", "_node_type")}, text=entity["text"])
            record = by_id[node.ref_doc_id]
            assert (node.node_id, node.get_content(), node.metadata) == (row["id"], record.text, record.metadata)
            assert (row["id"], entity["doc_id"]) == (point_id(record.id), record.id)
            assert row["distance"] == pytest.approx(wanted[record.id], abs=1e-5)
            assert json.loads(entity["_node_content"])["text"] == ""  # the text is only in the text field
        assert sink.client.query("docs", filter='doc_id in ["doc-4"]', output_fields=["n"])[0]["n"] == 4


def test_langchain_adds_documents_with_every_width_or_is_told_which_is_missing(
    engine: Engine, records: list[Record], tmp_path: Path
) -> None:
    store_of = pytest.importorskip("langchain_milvus").Milvus
    embeddings = pytest.importorskip("langchain_core.embeddings").Embeddings
    document = pytest.importorskip("langchain_core.documents").Document

    class Cut(embeddings):  # type: ignore[misc, valid-type]
        def __init__(self, width: int) -> None:
            self.width = width

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            rows = engine.embed(texts, role="document", dimensions=self.width, normalize=True).embeddings
            return [[float(value) for value in row] for row in rows]

        def embed_query(self, text: str) -> list[float]:
            raise AssertionError("nothing is searched")

    uri = str(tmp_path / "x.db")
    stray = document("a stray document", metadata={"lang": "sv"})
    options = {"collection_name": "docs", "connection_args": {"uri": uri}, "enable_dynamic_field": True}
    with MilvusSink(uri, "docs", dimensions=[128, 384], fields="langchain") as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
        one = store_of(Cut(384), vector_field="d384", auto_id=False, **options)
        with pytest.raises(Exception, match="missed an field `d128`"):
            one.add_documents([stray], ids=["its-own-id"])
        assert sink.count() == 12
        both = store_of([Cut(128), Cut(384)], vector_field=["d128", "d384"], auto_id=False, **options)
        both.add_documents([stray], ids=["its-own-id"])
        for coarse_to_fine in (True, False):
            hit = sink.search(engine, "a stray document", k=1, coarse_to_fine=coarse_to_fine)[0]
            assert (hit.id, hit.text, hit.metadata) == ("its-own-id", "a stray document", {"lang": "sv"})
        sink.delete([hit.id])
        assert sink.count() == 12
        for store in (one, both):
            store.client.close()


def test_the_id_of_a_node_that_llama_index_wrote_is_its_own(
    engine: Engine, records: list[Record], tmp_path: Path
) -> None:
    with MilvusSink(tmp_path / "x.db", "docs", fields="llama_index") as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
        row = engine.embed(["a stray node"], role="document", normalize=True).embeddings[0]
        content = json.dumps({"id_": "n-1", "text": "a stray node", "metadata": {"lang": "sv"}})
        node = {"doc_id": "a document", "text": "a stray node", "d384": row, "_node_content": content}
        sink.client.insert("docs", [{"id": "n-1", **node}, {"id": "n-2", **node}])
        hits = sink.search(engine, "a stray node", k=2)
        assert [hit.score for hit in hits] == pytest.approx([1, 1], abs=1e-5)
        assert {(hit.id, hit.text, hit.metadata["lang"]) for hit in hits} == {
            (name, "a stray node", "sv") for name in ("n-1", "n-2")
        }
        sink.delete(["n-1", "doc-0"])
        assert sink.count() == 12
