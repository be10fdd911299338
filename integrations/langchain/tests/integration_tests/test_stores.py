"""LangChain's stores over MillpondEmbeddings rank as numpy does, and its parts take the rerankers."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_milvus import Milvus
from langchain_qdrant import QdrantVectorStore
from tests.adapters import QUESTION

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker
from millpond import Engine

pytestmark = pytest.mark.contract


@pytest.fixture
def embeddings(prompted: str) -> MillpondEmbeddings:
    return MillpondEmbeddings(model=prompted, dtype="float32")


@pytest.fixture
def expected(engine: Engine, texts: list[str]) -> list[tuple[str, float]]:
    """Every text with its cosine to the question, best first, by numpy."""
    documents = engine.embed(texts, prompt="search_document: ").embeddings
    query = engine.embed([QUESTION], prompt="search_query: ").embeddings[0]
    scores = documents @ query / (np.linalg.norm(documents, axis=1) * np.linalg.norm(query))
    return [(texts[i], float(scores[i])) for i in np.argsort(-scores)]


@pytest.mark.parametrize("name", ["memory", "qdrant", "milvus"])
async def test_a_store_adds_upserts_and_ranks(
    name: str, embeddings: MillpondEmbeddings, texts: list[str], expected: list[tuple[str, float]], tmp_path: Path
) -> None:
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts]
    documents = [Document(page_content=text, id=id) for text, id in zip(texts, ids, strict=True)]
    place = {
        "connection_args": {"uri": str(tmp_path / "milvus.db")},
        "index_params": {"index_type": "FLAT", "metric_type": "COSINE"},
    }
    classes: dict[str, tuple[Any, dict[str, Any]]] = {
        "memory": (InMemoryVectorStore, {}),
        "qdrant": (QdrantVectorStore, {"location": ":memory:"}),
        "milvus": (Milvus, place),
    }
    store_class, options = classes[name]
    store = store_class.from_texts(texts[:6], embeddings, ids=ids[:6], **options)
    if name == "milvus":
        store.upsert(ids=ids, documents=documents)
    else:
        assert await store.aadd_documents(documents, ids=ids) == ids
    for hits in (
        store.similarity_search_with_score(QUESTION, k=20),
        await store.asimilarity_search_with_score(QUESTION, k=20),
    ):
        assert [document.page_content for document, _ in hits] == [text for text, _ in expected]
        np.testing.assert_allclose([score for _, score in hits], [score for _, score in expected], atol=1e-5)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    for found in (retriever.invoke(QUESTION), await retriever.ainvoke(QUESTION)):
        assert [document.page_content for document in found] == [text for text, _ in expected[:3]]


@pytest.mark.parametrize("fixture", ["engine", "cross_encoder_engine"])
def test_langchains_own_reranker_takes_the_cross_encoder(
    request: pytest.FixtureRequest, embeddings: MillpondEmbeddings, texts: list[str], fixture: str
) -> None:
    engine = request.getfixturevalue(fixture)
    retriever = InMemoryVectorStore.from_texts(texts, embeddings).as_retriever(search_kwargs={"k": 8})
    mine = MillpondReranker(engine=engine, top_n=4)
    theirs = CrossEncoderReranker(model=MillpondCrossEncoder(engine=engine), top_n=4)
    found = [
        ContextualCompressionRetriever(base_compressor=each, base_retriever=retriever).invoke(QUESTION)
        for each in (mine, theirs)
    ]
    names = [[document.page_content for document in documents] for documents in found]
    candidates = [document.page_content for document in retriever.invoke(QUESTION)]
    assert names[0] == names[1] != candidates[:4]
