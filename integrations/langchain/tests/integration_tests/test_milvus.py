"""A round trip through langchain-milvus on Milvus Lite."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_milvus import Milvus

from langchain_millpond import MillpondEmbeddings
from millpond import Engine

pytestmark = pytest.mark.contract

QUESTION = "What makes dough rise?"


@pytest.fixture
def embeddings(prompted: str) -> MillpondEmbeddings:
    return MillpondEmbeddings(model=prompted, dtype="float32")


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """The store's location, with cosine as its metric."""
    return {
        "connection_args": {"uri": str(tmp_path / "milvus.db")},
        "index_params": {"index_type": "FLAT", "metric_type": "COSINE"},
    }


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


def test_round_trip(
    embeddings: MillpondEmbeddings, place: dict[str, Any], texts: list[str], expected: list[tuple[str, float]]
) -> None:
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts]
    store = Milvus.from_texts(texts[:6], embeddings, ids=ids[:6], **place)
    documents = [Document(page_content=text) for text in texts]
    for _ in range(2):
        store.upsert(ids=ids, documents=documents)
    check(store.similarity_search_with_score(QUESTION, k=20), expected)
    best = [text for text, _ in expected[:3]]
    retriever = store.as_retriever(search_kwargs={"k": 3})
    assert [document.page_content for document in retriever.invoke(QUESTION)] == best


def test_added_documents(
    embeddings: MillpondEmbeddings, place: dict[str, Any], texts: list[str], expected: list[tuple[str, float]]
) -> None:
    store = Milvus(embedding_function=embeddings, **place)
    ids = [str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts]
    documents = [Document(page_content=text, metadata={"n": i}) for i, text in enumerate(texts)]
    assert store.add_documents(documents, ids=ids) == ids
    hits = store.similarity_search_with_score(QUESTION, k=12)
    check(hits, expected)
    assert hits[0][0].metadata["n"] == texts.index(expected[0][0])


async def test_asynchronous_calls(
    embeddings: MillpondEmbeddings, place: dict[str, Any], texts: list[str], expected: list[tuple[str, float]]
) -> None:
    store = await Milvus.afrom_texts(
        texts[:6], embeddings, ids=[str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts[:6]], **place
    )
    await store.aadd_texts(texts[6:], ids=[str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts[6:]])
    check(await store.asimilarity_search_with_score(QUESTION, k=20), expected)
    best = [text for text, _ in expected[:3]]
    retriever = store.as_retriever(search_kwargs={"k": 3})
    assert [document.page_content for document in await retriever.ainvoke(QUESTION)] == best
