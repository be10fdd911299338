"""LangChain's retriever over a sink: LangChain's own suite, the sink's options, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from pydantic import ValidationError

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Chunking, CollectionSink, Record, ingest

QdrantSink = pytest.importorskip("millpond_qdrant").QdrantSink
MillpondSinkRetriever = pytest.importorskip("langchain_millpond").MillpondSinkRetriever
suite = pytest.importorskip("langchain_tests.integration_tests").RetrieversIntegrationTests

TEXTS = [
    "Bread rises because yeast gives off gas.",
    "The moon causes the tides.",
    "A zip archive holds compressed files.",
    "The heart moves blood around the body.",
    "A violin has four strings.",
]
QUESTION = "what makes dough rise?"


@pytest.fixture(scope="module")
def sink(engine: Engine) -> Iterator[CollectionSink[Any]]:
    records = [Record(f"doc-{n}", text, {"n": n, "tags": ["even"] * (n % 2 == 0)}) for n, text in enumerate(TEXTS)]
    with QdrantSink(":memory:", "docs", dimensions=[64, 384]) as sink:
        ingest(records, engine=engine, sink=sink, show_progress=False)
        yield sink


class TestSuite(suite):  # type: ignore[misc, valid-type]
    """LangChain's tests of retrievers."""

    @pytest.fixture(autouse=True)
    def _sink(self, sink: CollectionSink[Any], engine: Engine) -> None:
        self._params = {"sink": sink, "engine": engine}

    @property
    def retriever_constructor(self) -> Any:
        return MillpondSinkRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return self._params

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


@pytest.mark.parametrize(
    "options", [{}, {"coarse_to_fine": False}, {"candidates": 4}, {"filter": {"n": [0, 1]}}], ids=str
)
async def test_documents_are_the_hits_of_the_sink(
    sink: CollectionSink[Any], engine: Engine, options: dict[str, Any]
) -> None:
    hits = sink.search(engine, QUESTION, k=3, **options)
    retriever = MillpondSinkRetriever(sink=sink, engine=engine, k=3, **options)
    for found in (retriever.invoke(QUESTION), await retriever.ainvoke(QUESTION)):
        assert [(document.id, document.page_content) for document in found] == [(hit.id, hit.text) for hit in hits]
        for document, hit in zip(found, hits, strict=True):
            assert document.metadata == {**hit.metadata, "relevance_score": pytest.approx(hit.score, abs=1e-5)}


async def test_a_chunk_is_expanded_to_its_document(engine: Engine) -> None:
    pytest.importorskip("semantic_text_splitter")
    book = Record("book", " ".join(TEXTS * 2))
    with QdrantSink(":memory:", "docs") as sink:
        ingest([book], engine=engine, sink=sink, chunking=Chunking(max_tokens=16, overlap=4), show_progress=False)
        assert sink.count() > 4
        retriever = MillpondSinkRetriever(sink=sink, engine=engine, k=3, expand="parent")
        for found in (retriever.invoke(QUESTION), await retriever.ainvoke(QUESTION)):
            assert [(document.id, document.page_content) for document in found] == [("book", book.text)]
            span = slice(found[0].metadata["chunk_start"], found[0].metadata["chunk_end"])
            assert "yeast" in book.text[span] and len(book.text[span]) < 100
        with pytest.raises(ValidationError, match="parent"):
            MillpondSinkRetriever(sink=sink, engine=engine, expand="all")


@pytest.mark.parametrize("call", ["invoke", "ainvoke"])
async def test_a_run_is_traced_with_the_names_of_database_and_model(
    sink: CollectionSink[Any], engine: Engine, call: str
) -> None:
    collector = RunCollectorCallbackHandler()
    config: Any = {"callbacks": [collector]}
    retriever = MillpondSinkRetriever(sink=sink, engine=engine)
    found = retriever.invoke(QUESTION, config) if call == "invoke" else await retriever.ainvoke(QUESTION, config)
    assert found
    (run,) = collector.traced_runs
    assert run.extra is not None
    assert run.extra["metadata"] == {
        "ls_retriever_name": "millpondsink",
        "ls_vector_store_provider": "QdrantSink",
        "ls_embedding_provider": "millpond",
        "ls_embedding_model": Path(engine.spec.name).name,
    }


def test_k_and_filter_are_those_of_the_call(sink: CollectionSink[Any], engine: Engine) -> None:
    retriever = MillpondSinkRetriever(sink=sink, engine=engine, filter={"n": 1})
    assert [document.id for document in retriever.invoke(QUESTION)] == ["doc-1"]
    assert [document.id for document in retriever.invoke(QUESTION, filter={"n": 3})] == ["doc-3"]
    assert len(retriever.invoke(QUESTION, filter={"tags": "even"}, k=2)) == 2


def test_a_threshold_leaves_out_what_is_below(sink: CollectionSink[Any], engine: Engine) -> None:
    scores = [hit.score for hit in sink.search(engine, QUESTION)]
    retriever = MillpondSinkRetriever(sink=sink, engine=engine, score_threshold=(scores[1] + scores[2]) / 2)
    assert len(retriever.invoke(QUESTION)) == 2


def test_changing_a_document_changes_nothing_that_is_found_next(sink: CollectionSink[Any], engine: Engine) -> None:
    retriever = MillpondSinkRetriever(sink=sink, engine=engine, k=1)
    (found,) = retriever.invoke(QUESTION)
    found.metadata["tags"].append("changed")
    assert retriever.invoke(QUESTION)[0].metadata["tags"] == ["even"]


def test_what_is_wrong_is_named(sink: CollectionSink[Any], engine: Engine, minilm: str) -> None:
    for wrong in ("qdrant+path:x#docs", None, object()):
        with pytest.raises(ValidationError, match="sink is of type"):
            MillpondSinkRetriever(sink=wrong, engine=engine)
    with pytest.raises(ValidationError, match="pass either model= .* or engine="):
        MillpondSinkRetriever(sink=sink)
    with pytest.raises(ValidationError, match="similarity_top_k"):
        MillpondSinkRetriever(sink=sink, engine=engine, similarity_top_k=3)
    with pytest.raises(InvalidRequestError, match="holds no sparse vectors"):
        MillpondSinkRetriever(sink=sink, engine=engine, hybrid=True).invoke(QUESTION)
    with pytest.raises(FingerprintMismatchError, match="pooling='mean'"):
        MillpondSinkRetriever(sink=sink, model=minilm, pooling="cls").invoke(QUESTION)


def test_it_is_not_serialized_as_if_it_could_be_loaded_again(sink: CollectionSink[Any], engine: Engine) -> None:
    from langchain_core.load import dumps

    written = dumps(MillpondSinkRetriever(sink=sink, model="some/model"))
    assert '"not_implemented"' in written and "QdrantClient" not in written
