"""Retrieve, then rerank, on the standard library's own documentation: in LCEL and in LangChain's classic retriever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_milvus import Milvus
from langchain_qdrant import QdrantVectorStore

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker
from millpond import Engine

pytestmark = pytest.mark.contract

QUESTION = "how much space is left on the disk?"
ANSWER = "shutil.disk_usage"
CANDIDATES = 10


@pytest.fixture(params=["qdrant", "milvus"])
def retriever(
    request: pytest.FixtureRequest, engine: Engine, passages: list[Document], tmp_path: Path
) -> BaseRetriever:
    embeddings = MillpondEmbeddings(engine=engine)
    store: Any
    if request.param == "qdrant":
        store = QdrantVectorStore.from_documents(passages, embeddings, location=":memory:")
    else:
        store = Milvus.from_documents(
            passages,
            embeddings,
            connection_args={"uri": str(tmp_path / "milvus.db")},
            index_params={"index_type": "FLAT", "metric_type": "COSINE"},
        )
    found: BaseRetriever = store.as_retriever(search_kwargs={"k": CANDIDATES})
    return found


@pytest.fixture
def reranker(engine: Engine) -> MillpondReranker:
    return MillpondReranker(engine=engine, top_n=3)


def names(documents: list[Document]) -> list[str]:
    return [document.metadata["name"] for document in documents]


def chain_of(retriever: BaseRetriever, reranker: MillpondReranker) -> Runnable[str, list[Document]]:
    """The two stages in LCEL, for ``invoke`` and ``ainvoke``."""

    def compress(found: dict[str, Any]) -> list[Document]:
        return reranker.compress_documents(found["documents"], found["query"])

    async def acompress(found: dict[str, Any]) -> list[Document]:
        return await reranker.acompress_documents(found["documents"], found["query"])

    stages = RunnableParallel(documents=retriever, query=RunnablePassthrough())
    chain: Runnable[str, list[Document]] = stages | RunnableLambda(compress, afunc=acompress)
    return chain


async def test_both_stages_find_the_answer(
    retriever: BaseRetriever, reranker: MillpondReranker, engine: Engine
) -> None:
    candidates = retriever.invoke(QUESTION)
    assert len(candidates) == CANDIDATES
    texts = [document.page_content for document in candidates]
    expected = engine.rerank(QUESTION, texts, top_n=3, method="maxsim")
    chain = chain_of(retriever, reranker)
    compressor = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=retriever)
    for found in (
        chain.invoke(QUESTION),
        await chain.ainvoke(QUESTION),
        compressor.invoke(QUESTION),
        await compressor.ainvoke(QUESTION),
    ):
        assert names(found)[0] == ANSWER
        assert names(found) != names(candidates)[:3]  # the second stage changed the order
        assert [document.page_content for document in found] == [result.document for result in expected]
        scores = [document.metadata["relevance_score"] for document in found]
        assert scores == pytest.approx([result.relevance_score for result in expected], abs=1e-4)


def test_langchains_own_reranker_takes_the_cross_encoder(
    retriever: BaseRetriever, engine: Engine, cross_encoder: str
) -> None:
    mine = MillpondReranker(engine=engine, top_n=4)
    theirs = CrossEncoderReranker(model=MillpondCrossEncoder(engine=engine), top_n=4)
    candidates = retriever.invoke(QUESTION)
    assert names(list(theirs.compress_documents(candidates, QUESTION))) == names(
        mine.compress_documents(candidates, QUESTION)
    )
    tiny = MillpondReranker(model=cross_encoder, dtype="float32", top_n=4)
    chosen = ContextualCompressionRetriever(base_compressor=tiny, base_retriever=retriever).invoke(QUESTION)
    theirs = CrossEncoderReranker(model=MillpondCrossEncoder(model=cross_encoder, dtype="float32"), top_n=4)
    assert names(chosen) == names(list(theirs.compress_documents(candidates, QUESTION)))
    assert names(chosen) != names(candidates[:4])
