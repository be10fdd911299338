"""A round trip through langchain-qdrant."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_qdrant import QdrantVectorStore

from langchain_millpond import MillpondEmbeddings
from millpond import Engine

pytestmark = pytest.mark.contract

QUESTION = "What makes dough rise?"


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


def check(hits: list[tuple[Document, float]], expected: list[tuple[str, float]]) -> None:
    assert [document.page_content for document, _ in hits] == [text for text, _ in expected]
    np.testing.assert_allclose([score for _, score in hits], [score for _, score in expected], atol=1e-5)


def test_from_texts(embeddings: MillpondEmbeddings, texts: list[str], expected: list[tuple[str, float]]) -> None:
    store = QdrantVectorStore.from_texts(texts, embeddings, location=":memory:", collection_name="texts")
    check(store.similarity_search_with_score(QUESTION, k=12), expected)


def test_added_documents_are_upserted_by_id(
    embeddings: MillpondEmbeddings, texts: list[str], expected: list[tuple[str, float]]
) -> None:
    store = QdrantVectorStore.from_texts(texts[:1], embeddings, ids=[_id(texts[0])], location=":memory:")
    documents = [Document(page_content=text, metadata={"n": i}) for i, text in enumerate(texts)]
    for _ in range(2):
        assert store.add_documents(documents, ids=[_id(text) for text in texts]) == [_id(text) for text in texts]
    assert store.client.count(store.collection_name).count == 12
    hits = store.similarity_search_with_score(QUESTION, k=12)
    check(hits, expected)
    assert hits[0][0].metadata["n"] == texts.index(expected[0][0])


async def test_retriever(embeddings: MillpondEmbeddings, texts: list[str], expected: list[tuple[str, float]]) -> None:
    store = await QdrantVectorStore.afrom_texts(texts, embeddings, location=":memory:")
    retriever = store.as_retriever(search_kwargs={"k": 3})
    best = [text for text, _ in expected[:3]]
    assert [document.page_content for document in retriever.invoke(QUESTION)] == best
    assert [document.page_content for document in await retriever.ainvoke(QUESTION)] == best


def _id(text: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, text))
