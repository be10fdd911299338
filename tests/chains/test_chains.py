"""Retrieve, rerank, hand the context on: in LCEL, in LangChain's classic retriever and in a LlamaIndex query engine.

The text is the standard library's documentation, the model the real MiniLM, the databases Qdrant and Milvus Lite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.ingest import CollectionSink, Record, ingest

pytest.importorskip("milvus_lite")
MilvusSink = pytest.importorskip("millpond_milvus").MilvusSink
QdrantSink = pytest.importorskip("millpond_qdrant").QdrantSink
langchain = pytest.importorskip("langchain_millpond")
pytest.importorskip("langchain_classic")
pytest.importorskip("langchain_milvus")
pytest.importorskip("langchain_qdrant")
pytest.importorskip("llama_index.core")
pytest.importorskip("llama_index.vector_stores.qdrant")

from langchain_classic.retrievers import ContextualCompressionRetriever  # noqa: E402
from langchain_core.callbacks import BaseCallbackHandler  # noqa: E402
from langchain_core.documents import Document  # noqa: E402
from langchain_core.language_models import FakeListChatModel  # noqa: E402
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough  # noqa: E402

from langchain_millpond import MillpondEmbeddings, MillpondReranker, MillpondSinkRetriever  # noqa: E402

QUESTION = "how much space is left on the disk?"
ANSWER = "shutil.disk_usage"
CANDIDATES = 12
WIDTHS = [64, 384]


@pytest.fixture(scope="module")
def sparse_engine(engine_of: Callable[..., Engine]) -> Engine:
    """Sparse vectors of random weights: what they find means nothing, and is fused all the same."""
    return engine_of(write_splade)


def fill(sink: CollectionSink[Any], engine: Engine, records: list[Record], **options: Any) -> CollectionSink[Any]:
    report = ingest(records, engine=engine, sink=sink, show_progress=False, **options)
    assert (report.failed, report.read) == (0, len(records))
    return sink


@pytest.fixture(scope="module")
def qdrant(engine: Engine, records: list[Record]) -> Iterator[CollectionSink[Any]]:
    with QdrantSink(":memory:", "docs", dimensions=WIDTHS, fields="langchain") as sink:
        yield fill(sink, engine, records)


@pytest.fixture(scope="module")
def milvus(engine: Engine, records: list[Record], folder: Path) -> Iterator[CollectionSink[Any]]:
    with MilvusSink(folder / "m.db", "docs", dimensions=WIDTHS, fields="langchain", hybrid="bm25") as sink:
        yield fill(sink, engine, records)


@pytest.fixture(scope="module")
def hybrid_qdrant(engine: Engine, sparse_engine: Engine, records: list[Record]) -> Iterator[CollectionSink[Any]]:
    with QdrantSink(":memory:", "docs", dimensions=WIDTHS, hybrid=True) as sink:
        yield fill(sink, engine, records, sparse_engine=sparse_engine)


PAIRS = [
    "qdrant-dense+cross-encoder",
    "qdrant-coarse-to-fine+late-interaction",
    "qdrant-hybrid+cross-encoder",
    "milvus-dense+late-interaction",
    "milvus-coarse-to-fine+cross-encoder",
    "milvus-bm25+late-interaction",
]


@pytest.fixture(params=PAIRS)
def stages(
    request: pytest.FixtureRequest, engine: Engine, reranker: Engine
) -> tuple[MillpondSinkRetriever, MillpondReranker]:
    """Each search of each database, and a second stage."""
    first, _, second = request.param.partition("+")
    database, _, search = first.partition("-")
    hybrid = first == "qdrant-hybrid"
    retriever = MillpondSinkRetriever(
        sink=request.getfixturevalue("hybrid_qdrant" if hybrid else database),
        engine=engine,
        k=CANDIDATES,
        coarse_to_fine=search != "dense",
        hybrid=search in ("hybrid", "bm25"),
        sparse_engine=request.getfixturevalue("sparse_engine") if hybrid else None,
    )
    return retriever, MillpondReranker(engine=reranker if second == "cross-encoder" else engine, top_n=3)


class Prompts(BaseCallbackHandler):
    """Keeps what reached the language model."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **options: Any) -> None:
        self.texts += [message.content for batch in messages for message in batch]


def texts_of(documents: Sequence[Document]) -> list[str]:
    return [document.page_content for document in documents]


def chain_of(retriever: Any, second_stage: MillpondReranker) -> Runnable[str, dict[str, Any]]:
    """Both stages in LCEL, then a prompt and a language model: the chain of docs/rag.md."""

    def compress(found: dict[str, Any]) -> list[Document]:
        return list(second_stage.compress_documents(found["candidates"], found["question"]))

    async def acompress(found: dict[str, Any]) -> list[Document]:
        return list(await second_stage.acompress_documents(found["candidates"], found["question"]))

    prompt = ChatPromptTemplate.from_template("Context:\n{context}\n\nQuestion: {question}")
    chain: Runnable[str, dict[str, Any]] = (
        {"candidates": retriever, "question": RunnablePassthrough()}
        | RunnablePassthrough.assign(documents=RunnableLambda(compress, afunc=acompress))
        | RunnablePassthrough.assign(context=lambda found: "\n\n".join(texts_of(found["documents"])))
        | RunnablePassthrough.assign(answer=prompt | FakeListChatModel(responses=["an answer"]) | StrOutputParser())
    )
    return chain


async def test_the_reranked_context_reaches_the_model(stages: tuple[MillpondSinkRetriever, MillpondReranker]) -> None:
    retriever, second_stage = stages
    candidates = retriever.invoke(QUESTION)
    assert len(candidates) == CANDIDATES
    expected = second_stage.compress_documents(candidates, QUESTION)
    assert second_stage.engine is not None
    ranked = second_stage.engine.rerank(QUESTION, texts_of(candidates), top_n=3)
    assert texts_of(expected) == [result.document for result in ranked]
    if second_stage.engine is retriever.engine:  # the other one counts words
        assert expected[0].page_content.startswith(ANSWER)
    chain, seen = chain_of(retriever, second_stage), Prompts()
    for found in (chain.invoke(QUESTION, {"callbacks": [seen]}), await chain.ainvoke(QUESTION, {"callbacks": [seen]})):
        assert texts_of(found["documents"]) == texts_of(expected)
        assert found["answer"] == "an answer"
    assert seen.texts == ["Context:\n" + "\n\n".join(texts_of(expected)) + f"\n\nQuestion: {QUESTION}"] * 2

    classic = ContextualCompressionRetriever(base_compressor=second_stage, base_retriever=retriever)
    compressed = classic.invoke(QUESTION)
    assert texts_of(compressed) == texts_of(expected)
    assert [document.metadata["relevance_score"] for document in compressed] == pytest.approx(
        [document.metadata["relevance_score"] for document in expected], abs=1e-3
    )


@pytest.mark.parametrize("database", ["qdrant", "milvus"])
def test_the_stores_of_langchain_open_the_collection(
    database: str, request: pytest.FixtureRequest, engine: Engine, reranker: Engine, folder: Path
) -> None:
    """A store knows one width: it searches as the sink does without the coarse search."""
    from langchain_milvus import Milvus
    from langchain_qdrant import QdrantVectorStore

    sink = request.getfixturevalue(database)
    embeddings = MillpondEmbeddings(engine=engine)
    store: Any
    if database == "qdrant":
        store = QdrantVectorStore(sink.client, "docs", embedding=embeddings, vector_name="d384")
    else:
        store = Milvus(
            embeddings,
            collection_name="docs",
            vector_field="d384",
            connection_args={"uri": str(folder / "m.db")},
            enable_dynamic_field=True,
        )
    candidates = store.as_retriever(search_kwargs={"k": CANDIDATES})
    own = MillpondSinkRetriever(sink=sink, engine=engine, k=CANDIDATES, coarse_to_fine=False)
    assert texts_of(candidates.invoke(QUESTION)) == texts_of(own.invoke(QUESTION))
    second_stage = MillpondReranker(engine=reranker, top_n=3)
    found = [
        texts_of(ContextualCompressionRetriever(base_compressor=second_stage, base_retriever=each).invoke(QUESTION))
        for each in (candidates, own)
    ]
    assert found[0] == found[1]


def test_a_query_engine_of_llama_index_reads_the_reranked_nodes(
    engine: Engine, reranker: Engine, records: list[Record]
) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.schema import MetadataMode
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient

    from llama_index.embeddings.millpond import MillpondEmbedding
    from llama_index.postprocessor.millpond_rerank import MillpondRerank

    client = QdrantClient(":memory:")
    fill(QdrantSink(client, "docs", dimensions=WIDTHS, fields="llama_index"), engine, records)
    store = QdrantVectorStore(client=client, collection_name="docs", dense_vector_name="d384")
    index = VectorStoreIndex.from_vector_store(store, embed_model=MillpondEmbedding(engine=engine))
    candidates = index.as_retriever(similarity_top_k=CANDIDATES)
    found = candidates.retrieve(QUESTION)
    for second in (engine, reranker):
        ask = RetrieverQueryEngine.from_args(
            candidates,
            llm=MockLLM(),  # answers with its prompt
            node_postprocessors=[MillpondRerank(engine=second, top_n=3)],
        )
        answer = ask.query(QUESTION)
        # As MillpondRerank does, with the metadata: millpond stores nodes that exclude none of it.
        texts = [hit.node.get_content(metadata_mode=MetadataMode.EMBED) for hit in found]
        ranked = second.rerank(QUESTION, texts, top_n=3)
        expected = [found[result.index].node for result in ranked]
        assert [hit.node.ref_doc_id for hit in answer.source_nodes] == [node.ref_doc_id for node in expected]
        prompt = str(answer)
        positions = [prompt.index(node.get_content()) for node in expected]
        assert positions == sorted(positions) and QUESTION in prompt
        rest = [hit.node.get_content() for hit in found if hit.node not in expected]
        assert not any(text in prompt for text in rest if not any(text in node.get_content() for node in expected))
