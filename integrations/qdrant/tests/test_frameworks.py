"""Collections written by ingest, read by the frameworks' own vector stores."""

from __future__ import annotations

from typing import Any

import pytest
from qdrant_client import QdrantClient, models

from millpond import Engine
from millpond.ingest import Record, ingest, point_id
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract

QUESTION = "what moves blood around the body?"


@pytest.fixture
def client() -> QdrantClient:
    return QdrantClient(":memory:")


def scores(engine: Engine, records: list[Record], width: int) -> dict[str, float]:
    documents = engine.embed([r.text for r in records], role="document", dimensions=width, normalize=True).embeddings
    query = engine.embed([QUESTION], role="query", dimensions=width, normalize=True).embeddings[0]
    return {record.id: float(score) for record, score in zip(records, documents @ query, strict=True)}


def cut(engine: Engine, width: int) -> Any:
    """LangChain's embeddings, of one width."""
    embeddings = pytest.importorskip("langchain_core.embeddings").Embeddings

    class Cut(embeddings):  # type: ignore[misc, valid-type]
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            rows = engine.embed(texts, role="document", dimensions=width, normalize=True).embeddings
            return [[float(value) for value in row] for row in rows]

        def embed_query(self, text: str) -> list[float]:
            row = engine.embed([text], role="query", dimensions=width, normalize=True).embeddings[0]
            return [float(value) for value in row]

    return Cut()


@pytest.mark.parametrize("width", [128, 384])
def test_langchain_reads_its_documents(client: QdrantClient, engine: Engine, records: list[Record], width: int) -> None:
    store_of = pytest.importorskip("langchain_qdrant").QdrantVectorStore
    sink = QdrantSink(client, "docs", dimensions=[128, 384], fields="langchain")
    ingest(records, engine=engine, sink=sink, show_progress=False)

    store = store_of(client, "docs", embedding=cut(engine, width), vector_name=f"d{width}")
    found = store.similarity_search_with_score(QUESTION, k=12)
    wanted = scores(engine, records, width)
    texts = {record.text: record for record in records}
    assert len(found) == 12
    for document, score in found:
        record = texts[document.page_content]
        assert score == pytest.approx(wanted[record.id], abs=1e-5)
        assert {key: document.metadata[key] for key in record.metadata} == record.metadata
        assert document.metadata["_id"] == point_id(record.id)
    only = models.Filter(must=[models.FieldCondition(key="metadata.n", match=models.MatchValue(value=4))])
    assert [d.page_content for d in store.similarity_search(QUESTION, k=3, filter=only)] == [records[4].text]
    assert [d.page_content for d in store.get_by_ids([point_id("doc-7")])] == [records[7].text]


def test_llama_index_reads_its_nodes(client: QdrantClient, engine: Engine, records: list[Record]) -> None:
    store_of = pytest.importorskip("llama_index.vector_stores.qdrant").QdrantVectorStore
    types = pytest.importorskip("llama_index.core.vector_stores")
    odd = [
        *records,
        Record("doc-x", 'text with "quotes" — ä\n', {"doc_id": "mine", "text": "also mine", "d": {"e": [1]}}),
    ]
    sink = QdrantSink(client, "docs", dimensions=[128, 384], fields="llama_index")
    ingest(odd, engine=engine, sink=sink, show_progress=False)
    store = store_of(client=client, collection_name="docs", dense_vector_name="d384")
    query = engine.embed([QUESTION], role="query", normalize=True).embeddings[0].tolist()
    wanted = scores(engine, odd, 384)

    found = store.query(types.VectorStoreQuery(query_embedding=query, similarity_top_k=13))
    assert found.nodes is not None and found.similarities is not None and len(found.nodes) == 13
    by_id = {record.id: record for record in odd}
    for node, score in zip(found.nodes, found.similarities, strict=True):
        record = by_id[node.ref_doc_id]
        assert (node.node_id, node.get_content(), node.metadata) == (point_id(record.id), record.text, record.metadata)
        assert score == pytest.approx(wanted[record.id], abs=1e-5)

    only = types.MetadataFilters(filters=[types.MetadataFilter(key="n", value=4)])
    found = store.query(types.VectorStoreQuery(query_embedding=query, similarity_top_k=3, filters=only))
    assert [node.ref_doc_id for node in found.nodes or []] == ["doc-4"]
    store.delete("doc-4")
    assert sink.count() == 12


STRAYS = [f"the price of {noun}" for noun in ("bread", "a violin", "the heart", "copper", "a mill pond")]


@pytest.mark.parametrize(
    ("width", "dimensions"),
    [(384, [384]), (384, [16, 128, 384]), (128, [128, 384])],
)
def test_documents_that_langchain_adds_are_found_too(
    client: QdrantClient, engine: Engine, records: list[Record], width: int, dimensions: list[int]
) -> None:
    store_of = pytest.importorskip("langchain_qdrant").QdrantVectorStore
    document = pytest.importorskip("langchain_core.documents").Document
    sink = QdrantSink(client, "docs", dimensions=dimensions, fields="langchain")
    ingest(records, engine=engine, sink=sink, show_progress=False)
    store = store_of(client, "docs", embedding=cut(engine, width), vector_name=f"d{width}")
    added = store.add_documents([document(text, metadata={"lang": "sv"}) for text in STRAYS])
    wanted = scores(engine, records, 384) | scores(engine, [Record(text, text) for text in STRAYS], width)
    for coarse_to_fine in (True, False):
        hits = sink.search(engine, QUESTION, k=17, coarse_to_fine=coarse_to_fine)
        assert [hit.score for hit in hits] == pytest.approx(sorted(wanted.values(), reverse=True), abs=1e-5)
        strays = {hit.text: hit for hit in hits if hit.id.replace("-", "") in added}
        assert strays.keys() == set(STRAYS)
        assert all(hit.score == pytest.approx(wanted[text], abs=1e-5) for text, hit in strays.items())
        assert {hit.metadata["lang"] for hit in strays.values()} == {"sv"}
        found = sink.search(engine, QUESTION, k=17, coarse_to_fine=coarse_to_fine, filter={"lang": "sv"})
        assert [hit.text for hit in found] == sorted(STRAYS, key=wanted.__getitem__, reverse=True)
    sink.delete([found[0].id])
    assert sink.count() == 16
    sink.delete(added)
    assert sink.count() == 12


def test_nodes_that_llama_index_adds_are_found_too(client: QdrantClient, engine: Engine, records: list[Record]) -> None:
    store_of = pytest.importorskip("llama_index.vector_stores.qdrant").QdrantVectorStore
    schema = pytest.importorskip("llama_index.core.schema")
    sink = QdrantSink(client, "docs", dimensions=[128, 384], fields="llama_index")
    ingest(records, engine=engine, sink=sink, show_progress=False)
    store = store_of(client=client, collection_name="docs", dense_vector_name="d384")
    rows = engine.embed(STRAYS, role="document", normalize=True).embeddings
    source = {schema.NodeRelationship.SOURCE: schema.RelatedNodeInfo(node_id="a document")}
    nodes = [
        schema.TextNode(text=text, embedding=row.tolist(), metadata={"lang": "sv"}, relationships=source if n else {})
        for n, (text, row) in enumerate(zip(STRAYS, rows, strict=True))
    ]
    assert store.add(nodes) == [node.node_id for node in nodes]
    wanted = scores(engine, [*records, *(Record(node.node_id, node.text) for node in nodes)], 384)
    hits = sink.search(engine, QUESTION, k=17)
    assert [hit.id for hit in hits] == sorted(wanted, key=wanted.__getitem__, reverse=True)
    assert [hit.score for hit in hits] == pytest.approx([wanted[hit.id] for hit in hits], abs=1e-5)
    found = {hit.id: hit for hit in sink.search(engine, QUESTION, k=17, filter={"lang": "sv"})}
    assert {hit.text for hit in found.values()} == set(STRAYS)
    sink.delete([next(iter(found))])
    assert sink.count() == 16
    sink.delete(filter={"lang": "sv"})
    assert {hit.id for hit in sink.search(engine, QUESTION, k=17)} == {record.id for record in records}
