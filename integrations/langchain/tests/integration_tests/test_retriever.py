"""The ColBERT retriever: LangChain's own suite, filters, candidates of other stores, and what stays unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from langchain_millpond import MillpondColBERTRetriever, MillpondEmbeddings
from millpond import Engine
from millpond.late_interaction import MemoryIndex

QUESTION = "what makes dough rise?"


@pytest.fixture(scope="module")
def index(engine: Engine, texts: list[str]) -> MemoryIndex:
    index = MemoryIndex(engine)
    numbers = range(len(texts))
    index.add(
        [f"doc-{n}" for n in numbers], texts, [{"n": n, "tags": ["even" if n % 2 == 0 else "odd"]} for n in numbers]
    )
    return index


class TestMillpondColBERTRetriever(RetrieversIntegrationTests):
    """LangChain's tests over a MemoryIndex of real text."""

    @pytest.fixture(autouse=True)
    def _index(self, index: MemoryIndex) -> None:
        self._index_of_texts = index

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return MillpondColBERTRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": self._index_of_texts}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION


class Keywords(BaseRetriever):
    """Documents that contain a word of the query, in order: a stand-in for BM25 that needs no further package."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().strip("?").split())
        return [document for document in self.documents if words & set(document.page_content.lower().split())]


def assert_same(found: list[Document], expected: list[Document]) -> None:
    """The same documents; a question encoded in another thread may be rounded otherwise, and int8 rounds once more."""
    scores = [[document.metadata["relevance_score"] for document in documents] for documents in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    for documents in (found, expected):
        for document in documents:
            document.metadata["relevance_score"] = 0
    assert found == expected


def test_documents_are_those_of_the_index(index: MemoryIndex) -> None:
    found = MillpondColBERTRetriever(index=index, k=3).invoke(QUESTION)
    hits = index.search([QUESTION], k=3)[0]
    assert [document.id for document in found] == [hit.id for hit in hits]
    assert found[0].page_content.startswith("Bread rises")
    assert found[0].metadata == {"n": 2, "tags": ["even"], "relevance_score": pytest.approx(hits[0].score, abs=0.01)}


def test_k_and_filter_at_call_time(index: MemoryIndex) -> None:
    retriever = MillpondColBERTRetriever(index=index, k=2, filter={"tags": "even"})
    assert [document.metadata["tags"] for document in retriever.invoke(QUESTION)] == [["even"]] * 2
    assert len(retriever.invoke(QUESTION, k=5)) == 5
    assert [document.id for document in retriever.invoke(QUESTION, filter={"n": [3, 5]}, k=9)] != []
    assert {document.metadata["n"] for document in retriever.invoke(QUESTION, filter={"n": [3, 5]}, k=9)} == {3, 5}


def test_the_async_method_returns_the_same(index: MemoryIndex) -> None:
    retriever = MillpondColBERTRetriever(index=index, sources=["index", lambda query, limit: ["doc-3"]])
    assert_same(asyncio.run(retriever.ainvoke(QUESTION)), retriever.invoke(QUESTION))


def test_changing_a_document_changes_nothing_in_the_index(index: MemoryIndex) -> None:
    retriever = MillpondColBERTRetriever(index=index, k=1)
    retriever.invoke(QUESTION)[0].metadata["tags"].append("mine")
    assert retriever.invoke(QUESTION)[0].metadata["tags"] == ["even"]


def test_documents_that_are_added_are_not_changed(engine: Engine) -> None:
    documents = [
        Document(page_content="Tides follow the moon.", id="tides", metadata={"a": {"b": 1}}),
        Document(page_content="Bread rises."),
    ]
    before = [document.model_copy(deep=True) for document in documents]
    retriever = MillpondColBERTRetriever.from_documents(documents, index=MemoryIndex(engine), k=1)
    assert documents == before
    (found,) = retriever.invoke("the moon")
    assert found.id == "tides" and found.metadata["a"] == {"b": 1}
    assert retriever.add_documents(documents[1:]) == retriever.add_documents(documents[1:])  # its content is its id
    assert len(retriever.index) == 2


def test_candidates_come_from_a_dense_store_and_a_retriever(
    engine: Engine, index: MemoryIndex, texts: list[str]
) -> None:
    documents = [Document(page_content=text, id=f"doc-{n}") for n, text in enumerate(texts)]
    store = InMemoryVectorStore(MillpondEmbeddings(engine=engine))
    store.add_documents(documents)
    for source in (store, store.as_retriever(search_kwargs={"k": 2}), Keywords(documents=documents)):
        retriever = MillpondColBERTRetriever(index=index, k=2, sources=[source])
        found = retriever.invoke("how does bread rise")
        assert found[0].id == "doc-2"
        assert_same(found, asyncio.run(retriever.ainvoke("how does bread rise")))
    keywords = MillpondColBERTRetriever(index=index, k=12, sources=[Keywords(documents=documents)]).invoke(
        "copper tides"
    )
    assert {document.id for document in keywords} == {"doc-9", "doc-11"}
    assert index.search(["copper tides"], k=12, ids=["doc-9", "doc-11"])[0][0].id == keywords[0].id


def test_the_id_of_a_source_is_read_where_id_key_says(index: MemoryIndex) -> None:
    named = Keywords(documents=[Document(page_content="bread", metadata={"source_id": "doc-2"})])
    found = MillpondColBERTRetriever(index=index, sources=[named], id_key="source_id").invoke("bread")
    assert [document.id for document in found] == ["doc-2"]
    with pytest.raises(ValueError, match="id_key= names the metadata key"):
        MillpondColBERTRetriever(index=index, sources=[named]).invoke("bread")


def test_a_threshold_leaves_out_lower_scores(index: MemoryIndex) -> None:
    scores = [hit.score for hit in index.search([QUESTION], k=3)[0]]
    retriever = MillpondColBERTRetriever(index=index, k=3, score_threshold=(scores[0] + scores[1]) / 2)
    assert len(retriever.invoke(QUESTION)) == 1


@pytest.mark.parametrize(
    "fields",
    [{"index": "docs"}, {"k": 0}, {"sources": []}, {"sources": ["bm25"]}, {"sources": "index"}, {"top_k": 3}],
    ids=["index", "k", "no sources", "name", "str", "unknown"],
)
def test_bad_fields_are_refused(index: MemoryIndex, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MillpondColBERTRetriever(**{"index": index, **fields})


def test_a_chain_of_retriever_and_function(index: MemoryIndex) -> None:
    chain = MillpondColBERTRetriever(index=index, k=1) | (lambda documents: documents[0].page_content)
    assert chain.invoke(QUESTION).startswith("Bread rises")
    assert chain.batch([QUESTION, "archives of files"]) == [chain.invoke(QUESTION), chain.invoke("archives of files")]
