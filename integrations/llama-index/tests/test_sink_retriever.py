"""LlamaIndex's retriever over a collection: chunks as nodes of their documents, and whole documents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.schema import QueryBundle
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from llama_index.retrievers.millpond import MillpondSinkRetriever
from millpond import Engine
from millpond.ingest import Chunking, CollectionSink, Record, ingest, open_sink, point_id

pytest.importorskip("semantic_text_splitter")
pytest.importorskip("millpond_qdrant")

DOUGH = "Bread rises because yeast gives off gas in the dough.\n\nThe crust of a loaf browns when the oven is very hot."
TIDES = "The moon causes the tides.\n\nA violin has four strings, and a bow of horsehair that makes them sound."


@pytest.fixture(scope="module")
def sink(engine: Engine) -> Iterator[CollectionSink[Any]]:
    with open_sink("qdrant+memory:#docs") as sink:
        assert isinstance(sink, CollectionSink)
        records = [Record("dough", DOUGH, {"n": 1}), Record("tides", TIDES, {"n": 2}), Record("zip", "A zip file.")]
        ingest(records, engine=engine, sink=sink, chunking=Chunking(max_tokens=20, overlap=0), show_progress=False)
        yield sink


def test_a_chunk_is_a_node_of_its_document(sink: CollectionSink[Any], engine: Engine) -> None:
    found = MillpondSinkRetriever(sink, engine, 9).retrieve("what makes dough rise?")
    first = found[0].node
    assert (first.node_id, first.ref_doc_id) == (point_id("dough", 0), "dough")
    assert first.text == DOUGH[first.start_char_idx : first.end_char_idx] and len(found) == 5
    assert len({each.node.node_id for each in found}) == 5
    assert "zip" in {each.node.node_id for each in found}  # which is no chunk


@pytest.mark.parametrize("aio", [False, True])
def test_a_document_is_returned_whole_and_once(sink: CollectionSink[Any], engine: Engine, aio: bool) -> None:
    retriever = MillpondSinkRetriever(sink, engine, 3, expand="parent")
    query = "how does a violin sound?"
    found = asyncio.run(retriever.aretrieve(query)) if aio else retriever.retrieve(QueryBundle(query))
    assert sorted(each.node.node_id for each in found) == ["dough", "tides", "zip"]
    assert found[0].text == TIDES and found[0].metadata["chunk"] == 1
    assert found[0].text[slice(found[0].metadata["chunk_start"], found[0].metadata["chunk_end"])].startswith("A violin")
    # Without it, the same question has two chunks of one document.
    chunks = MillpondSinkRetriever(sink, engine, 3).retrieve(query)
    assert chunks[0].text != TIDES


def test_filters_and_wrong_arguments(sink: CollectionSink[Any], engine: Engine) -> None:
    filters = MetadataFilters(filters=[MetadataFilter(key="n", value=1)])
    for each in (filters, {"n": 1}):
        found = MillpondSinkRetriever(sink, engine, 9, filters=each, expand="parent").retrieve("a violin")
        assert [node.node.node_id for node in found] == ["dough"]
    with pytest.raises(TypeError, match="sink is of type str; pass a QdrantSink"):
        MillpondSinkRetriever("docs", engine)  # type: ignore[arg-type]
