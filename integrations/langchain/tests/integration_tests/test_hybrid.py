"""Hybrid retrieval in langchain-qdrant and langchain-milvus: dense and sparse rankings fused as numpy fuses them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from langchain_core.documents import Document
from langchain_milvus import Milvus
from langchain_qdrant import QdrantVectorStore, RetrievalMode
from tests.adapters import QUESTION

from langchain_millpond import MillpondEmbeddings, MillpondSparseEmbeddings
from millpond import Engine

pytestmark = pytest.mark.contract

Scores = npt.NDArray[np.float64]


@pytest.fixture
def dense(prompted: str) -> MillpondEmbeddings:
    return MillpondEmbeddings(model=prompted, dtype="float32")


@pytest.fixture
def sparse(prompted_splade: str) -> MillpondSparseEmbeddings:
    return MillpondSparseEmbeddings(model=prompted_splade, dtype="float32")


@pytest.fixture
def dense_scores(engine: Engine, texts: list[str]) -> Scores:
    """The cosine of every text to the question, by numpy."""
    documents = engine.embed(texts, prompt="search_document: ").embeddings
    query = engine.embed([QUESTION], prompt="search_query: ").embeddings[0]
    scores: Scores = (documents @ query).astype(np.float64)
    return scores


@pytest.fixture
def sparse_scores(sparse: MillpondSparseEmbeddings, texts: list[str]) -> Scores:
    """The dot product of every text and the question over their common entries, by numpy, from the engine's weights."""
    engine = sparse._engine()
    documents = engine.sparse_embed(texts, role="document").embeddings
    (query,) = engine.sparse_embed([QUESTION], role="query").embeddings
    scores = np.array([sum(weight * row.get(token, 0) for token, weight in query.items()) for row in documents])
    assert len(set(np.round(scores, 4))) == len(texts)  # no ties, whose order a store may choose
    return scores


def fused(rankings: Sequence[Scores], *, constant: int, limit: int) -> dict[int, float]:
    """Reciprocal rank fusion of the best ``limit`` of each: ``sum 1 / (constant + rank)``, ranks from 0."""
    total: dict[int, float] = {}
    for scores in rankings:
        for rank, index in enumerate(np.argsort(-scores)[:limit].tolist()):
            total[index] = total.get(index, 0) + 1 / (constant + rank)
    return total


def check_fused(
    hits: list[tuple[Document, float]], rankings: Sequence[Scores], texts: list[str], *, constant: int, k: int
) -> None:
    """The hits have numpy's fused scores, and are its best ones, in any order within equal scores."""
    expected = fused(rankings, constant=constant, limit=k)
    assert len(hits) == min(k, len(expected))
    for document, score in hits:
        assert score == pytest.approx(expected[texts.index(document.page_content)], abs=1e-6)
    best = sorted(expected.values(), reverse=True)[: len(hits)]
    assert [score for _, score in hits] == pytest.approx(best, abs=1e-6)


def ids_of(texts: list[str]) -> list[str]:
    return [str(uuid.uuid5(uuid.NAMESPACE_URL, text)) for text in texts]


def test_the_two_rankings_differ(dense_scores: Scores, sparse_scores: Scores) -> None:
    """Otherwise no test below could tell the fusion from one of its parts."""
    assert np.argsort(-dense_scores).tolist() != np.argsort(-sparse_scores).tolist()


@pytest.mark.parametrize("k", [1, 4, 12])
def test_qdrant_fuses_both_rankings(
    dense: MillpondEmbeddings,
    sparse: MillpondSparseEmbeddings,
    texts: list[str],
    dense_scores: Scores,
    sparse_scores: Scores,
    k: int,
) -> None:
    store = QdrantVectorStore.from_texts(
        texts, dense, sparse_embedding=sparse, retrieval_mode=RetrievalMode.HYBRID, location=":memory:"
    )
    assert store.sparse_embeddings is sparse
    hits = store.similarity_search_with_score(QUESTION, k=k)
    check_fused(hits, [dense_scores, sparse_scores], texts, constant=2, k=k)


def test_qdrant_by_sparse_vectors_alone(
    sparse: MillpondSparseEmbeddings, texts: list[str], sparse_scores: Scores
) -> None:
    store = QdrantVectorStore.from_texts(
        texts, sparse_embedding=sparse, retrieval_mode=RetrievalMode.SPARSE, location=":memory:"
    )
    hits = store.similarity_search_with_score(QUESTION, k=12)
    order = np.argsort(-sparse_scores)
    assert [document.page_content for document, _ in hits] == [texts[index] for index in order]
    np.testing.assert_allclose([score for _, score in hits], sparse_scores[order], atol=1e-4)


async def test_qdrant_adds_upserts_and_searches_asynchronously(
    dense: MillpondEmbeddings,
    sparse: MillpondSparseEmbeddings,
    texts: list[str],
    dense_scores: Scores,
    sparse_scores: Scores,
) -> None:
    store = await QdrantVectorStore.afrom_texts(
        texts[:1],
        dense,
        ids=ids_of(texts[:1]),
        sparse_embedding=sparse,
        retrieval_mode=RetrievalMode.HYBRID,
        location=":memory:",
    )
    documents = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(texts)]
    for _ in range(2):
        await store.aadd_documents(documents, ids=ids_of(texts))
    assert store.client.count(store.collection_name).count == len(texts)
    hits = await store.asimilarity_search_with_score(QUESTION, k=12)
    check_fused(hits, [dense_scores, sparse_scores], texts, constant=2, k=12)
    retriever = store.as_retriever(search_kwargs={"k": 3})
    assert [document.metadata["n"] for document in await retriever.ainvoke(QUESTION)] == [
        document.metadata["n"] for document in retriever.invoke(QUESTION)
    ]


def test_texts_without_weights_are_stored_and_found_by_their_dense_vectors(m3: str, texts: list[str]) -> None:
    """BGE-M3 gives both kinds from one model; an empty text has no sparse entries."""
    dense = MillpondEmbeddings(model=m3, dtype="float32")
    sparse = MillpondSparseEmbeddings(model=m3, dtype="float32")
    assert sparse.embed_query("").indices == []
    store = QdrantVectorStore.from_texts(
        ["", *texts], dense, sparse_embedding=sparse, retrieval_mode=RetrievalMode.HYBRID, location=":memory:"
    )
    assert len(store.similarity_search(QUESTION, k=13)) == 13
    assert len(store.similarity_search("", k=3)) == 3


@pytest.mark.filterwarnings("ignore:The 'ranker_type' and 'ranker_params'")  # for a Function that Milvus Lite lacks
def test_milvus_fuses_both_rankings(
    dense: MillpondEmbeddings,
    prompted_splade: str,
    texts: list[str],
    dense_scores: Scores,
    sparse_scores: Scores,
    tmp_path: Path,
) -> None:
    store = Milvus.from_texts(
        texts,
        [dense, MillpondSparseEmbeddings(model=prompted_splade, dtype="float32", store="milvus")],
        ids=ids_of(texts),
        vector_field=["dense", "sparse"],
        index_params=[
            {"index_type": "FLAT", "metric_type": "COSINE"},
            {"index_type": "SPARSE_INVERTED_INDEX", "metric_type": "IP"},
        ],
        # langchain-milvus searches with a drop_ratio_build of 0.2 by default, which Milvus Lite refuses.
        search_params=[{"metric_type": "COSINE"}, {"metric_type": "IP"}],
        connection_args={"uri": str(tmp_path / "milvus.db")},
    )
    hits = store.similarity_search_with_score(QUESTION, k=12, fetch_k=12, ranker_type="rrf", ranker_params={"k": 60})
    check_fused(hits, [dense_scores, sparse_scores], texts, constant=61, k=12)
