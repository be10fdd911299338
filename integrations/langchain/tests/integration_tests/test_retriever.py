"""The ColBERT retriever: LangChain's own suite, filters, candidates of other stores, and what stays unchanged."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.retrievers import BaseRetriever
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from langchain_millpond import MillpondColBERTRetriever, MillpondEmbeddings
from millpond import Engine
from millpond.errors import InvalidRequestError
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


def invoked(retriever: MillpondColBERTRetriever, call: str, **arguments: Any) -> list[Document]:
    """The documents for the question, by ``invoke`` or ``ainvoke``."""
    if call == "invoke":
        return retriever.invoke(QUESTION, **arguments)
    return asyncio.run(retriever.ainvoke(QUESTION, **arguments))


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
    ranged = retriever.invoke(QUESTION, filter={"n": {"gte": 3, "lt": 5}}, k=9)
    assert {document.metadata["n"] for document in ranged} == {3, 4}


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
    ("options", "message"),
    [
        ({"index": "docs"}, "index is of type str; pass a MemoryIndex"),
        ({"k": 0}, "greater than 0"),
        ({"sources": "index"}, "valid list"),
        ({"model": "a"}, r"model='a' is not an option.* MillpondColBERTRetriever\(index=MemoryIndex\(Engine"),
        ({"top_k": 3}, "top_k=3 is not an option.* k= is the number of documents"),
    ],
    ids=["index", "k", "sources", "model", "top_k"],
)
def test_a_bad_option_is_refused_with_the_line_to_write(
    index: MemoryIndex, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondColBERTRetriever(**{"index": index, **options})


def test_a_bad_source_is_refused_by_the_search(index: MemoryIndex) -> None:
    for sources, message in ((["bm25"], "'bm25' is not a source"), ([], "sources=.. finds no candidates")):
        with pytest.raises((TypeError, InvalidRequestError), match=message):
            MillpondColBERTRetriever(index=index, sources=sources).invoke(QUESTION)


def test_the_model_is_that_of_the_index(index: MemoryIndex, engine: Engine) -> None:
    retriever = MillpondColBERTRetriever(index=index)
    assert retriever.model == retriever.model_name == engine.spec.name


def test_a_chain_of_retriever_and_function(index: MemoryIndex) -> None:
    chain = MillpondColBERTRetriever(index=index, k=1) | (lambda documents: documents[0].page_content)
    assert chain.invoke(QUESTION).startswith("Bread rises")
    assert chain.batch([QUESTION, "archives of files"]) == [chain.invoke(QUESTION), chain.invoke("archives of files")]


@pytest.mark.parametrize("call", ["invoke", "ainvoke"])
def test_a_run_has_tags_metadata_and_the_names_of_index_and_model(
    engine: Engine, index: MemoryIndex, call: str
) -> None:
    collector = RunCollectorCallbackHandler()
    retriever = MillpondColBERTRetriever(index=index, k=2, tags=["own"], metadata={"a": 1})
    config: Any = {"callbacks": [collector], "tags": ["call"], "metadata": {"b": 2}, "run_name": "lookup"}
    found = invoked(retriever, call, config=config)
    (run,) = collector.traced_runs
    assert run.name == "lookup"
    assert set(run.tags or []) == {"own", "call"}
    assert run.extra is not None
    assert run.extra["metadata"] == {
        "a": 1,
        "b": 2,
        "ls_retriever_name": "millpondcolbert",
        "ls_vector_store_provider": "MemoryIndex",
        "ls_embedding_provider": "millpond",
        "ls_embedding_model": Path(engine.spec.name).name,
    }
    assert run.outputs == {"documents": found}


def test_an_index_without_a_model_is_traced_without_one(engine: Engine) -> None:
    empty = MemoryIndex(engine)
    assert empty.model is None
    assert "ls_embedding_model" not in MillpondColBERTRetriever(index=empty)._get_ls_params()


@pytest.mark.parametrize("journey", ["copy", "deepcopy", "model_copy", "deep model_copy"])
def test_a_copy_has_the_same_index_and_sources(index: MemoryIndex, texts: list[str], journey: str) -> None:
    source = Keywords(documents=[Document(page_content=texts[2], id="doc-2")])
    built = MillpondColBERTRetriever(index=index, k=2, filter={"n": [2]}, sources=["index", source])
    journeys = {
        "copy": lambda: copy.copy(built),
        "deepcopy": lambda: copy.deepcopy(built),
        "model_copy": lambda: built.model_copy(),
        "deep model_copy": lambda: built.model_copy(deep=True),
    }
    after = journeys[journey]()
    assert after.index is index
    assert after.sources is not None
    assert after.sources[1] is source
    assert_same(after.invoke("bread"), built.invoke("bread"))
    if "deep" in journey:
        assert after.filter is not built.filter


def test_pickling_says_what_to_do(index: MemoryIndex) -> None:
    with pytest.raises(TypeError, match="cannot be pickled: its index holds.*open the index in the other process"):
        pickle.dumps(MillpondColBERTRetriever(index=index))


def test_what_is_written_down_has_the_settings_and_no_index(index: MemoryIndex) -> None:
    retriever = MillpondColBERTRetriever(index=index, k=7, filter={"n": 1})
    written = retriever.model_dump(exclude_none=True)
    assert (written["k"], written["filter"]) == (7, {"n": 1})
    assert "index" not in written
    assert "MemoryIndex" not in retriever.model_dump_json()
    assert dumpd(retriever)["type"] == "not_implemented"  # LangChain loads only what can be built from JSON
    with pytest.raises(ValidationError, match="index\n  Field required"):
        MillpondColBERTRetriever(**written)
    assert_same(MillpondColBERTRetriever(index=index, **written).invoke(QUESTION), retriever.invoke(QUESTION))
