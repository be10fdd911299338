"""MillpondSparseEmbedding: the engine's weights, LlamaIndex's events, and hybrid search in its Qdrant store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation.events.embedding import SparseEmbeddingEndEvent, SparseEmbeddingStartEvent
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import AsyncQdrantClient, QdrantClient
from tests.adapters import QUESTION, many
from tests.gates import batches_held

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
from millpond import Engine
from millpond.errors import EngineOverloadedError

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")


@pytest.fixture
def sparse(splade_engine: Engine) -> MillpondSparseEmbedding:
    return MillpondSparseEmbedding(engine=splade_engine)


def close(found: dict[int, float], expected: dict[int, float]) -> bool:
    return found.keys() == expected.keys() and all(
        found[index] == pytest.approx(weight, abs=1e-5) for index, weight in expected.items()
    )


def inner(left: dict[int, float], right: dict[int, float]) -> float:
    return sum(weight * right.get(index, 0.0) for index, weight in left.items())


@pytest.mark.parametrize("name", ["doc_fn", "query_fn"])
def test_the_stores_functions_give_indices_and_weights(
    sparse: MillpondSparseEmbedding, texts: list[str], name: str
) -> None:
    function = getattr(sparse, name)
    one = sparse.get_text_embedding if name == "doc_fn" else sparse.get_query_embedding
    given = [*texts[:2], texts[0], "", "\U0001f30a 潮汐"]
    indices, weights = function(given)
    assert len(indices) == len(weights) == len(given)
    assert (type(indices), type(weights), type(indices[0]), type(weights[0])) == (list, list, list, list)
    for text, own, values in zip(given, indices, weights, strict=True):
        assert own == sorted(set(own))
        assert close(dict(zip(own, values, strict=True)), one(text))
    assert function([]) == ([], [])


def test_a_text_without_entries_has_empty_lists(m3: str) -> None:
    sparse = MillpondSparseEmbedding(m3, dtype="float32")
    indices, weights = sparse.doc_fn(["", "hello", "Copper conducts electricity better than iron."])
    assert indices[:2] == weights[:2] == [[], []]
    assert len(indices[2]) == len(weights[2]) > 0


def test_one_checkpoint_and_one_engine_make_dense_and_sparse_vectors(m3: str) -> None:
    dense = MillpondEmbedding(m3, dtype="float32", truncate="start", max_length=32)
    sparse = dense.sparse
    assert (sparse.model_name, sparse.truncate) == (dense.model_name, "start")
    assert sparse._engine() is dense._engine()
    assert sparse.doc_fn(["Copper conducts electricity better than iron."])[0][0]
    assert len(dense.get_text_embedding("tides")) == 48
    with Engine(m3, dtype="float32") as engine:
        assert MillpondEmbedding(engine=engine).sparse.engine is engine


async def test_every_start_has_its_end(splade_engine: Engine, texts: list[str], recorder: Any) -> None:
    sparse = MillpondSparseEmbedding(engine=splade_engine, embed_batch_size=5)
    sparse.doc_fn(texts)
    sparse.query_fn([QUESTION, "tides"])
    await sparse.aget_text_embedding_batch(texts)
    starts, ends = recorder.of(SparseEmbeddingStartEvent), recorder.of(SparseEmbeddingEndEvent)
    assert [len(end.chunks) for end in ends] == [5, 5, 2, 1, 1, 5, 5, 2]
    assert [start.model_dict for start in starts] == [
        {
            "class_name": "MillpondSparseEmbedding",
            "model_name": splade_engine.spec.name,
            "embed_batch_size": 5,
        }
    ] * 8


async def test_a_corpus_larger_than_the_queue_waits_for_its_turn(prompted_splade: str) -> None:
    texts = many(48)
    with Engine(prompted_splade, dtype="float32", max_queue=20) as engine:
        sparse = MillpondSparseEmbedding(engine=engine, embed_batch_size=8)
        assert len(await sparse.aget_text_embedding_batch(texts)) == 48
        # A query raises, so that its caller can react.
        with batches_held(engine), pytest.raises(EngineOverloadedError):
            await asyncio.gather(*(sparse.aget_query_embedding(text) for text in texts))


def nodes_of(texts: list[str]) -> list[TextNode]:
    return [TextNode(id_=f"00000000-0000-0000-0000-{i:012}", text=text) for i, text in enumerate(texts)]


@pytest.mark.contract
def test_hybrid_search_in_qdrant(
    sparse: MillpondSparseEmbedding, splade_engine: Engine, engine: Engine, texts: list[str]
) -> None:
    embedding = MillpondEmbedding(engine=engine)
    store = QdrantVectorStore(
        "docs",
        client=QdrantClient(":memory:"),
        enable_hybrid=True,
        sparse_doc_fn=sparse.doc_fn,
        sparse_query_fn=sparse.query_fn,
        batch_size=5,
    )
    IngestionPipeline(transformations=[embedding], vector_store=store).run(nodes=nodes_of([*texts, ""]))
    documents = splade_engine.sparse_embed([*texts, ""], role="document")
    (query,) = splade_engine.sparse_embed([QUESTION], role="query")
    scores = {text: inner(query, own) for text, own in zip([*texts, ""], documents, strict=True)}

    found = store.query(
        VectorStoreQuery(query_str=QUESTION, sparse_top_k=13, similarity_top_k=13, mode=VectorStoreQueryMode.SPARSE)
    )
    assert found.nodes is not None
    assert found.similarities is not None
    assert [node.get_content() for node in found.nodes] == sorted(scores, key=lambda text: -scores[text])
    assert found.similarities == pytest.approx(sorted(scores.values(), reverse=True), rel=1e-4)

    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    hybrid = index.as_retriever(
        vector_store_query_mode="hybrid", similarity_top_k=1, sparse_top_k=1, hybrid_top_k=12, alpha=0.5
    )
    # Each search gives its best node: the sparse one differs from the dense one for some of these questions.
    differing = 0
    for question in (QUESTION, "copper or iron?", "a network of processes", "what feeds the wheel?", "strings"):
        (query,) = splade_engine.sparse_embed([question], role="query")
        by_words = max([*texts, ""], key=lambda text: inner(query, documents[[*texts, ""].index(text)]))
        by_meaning = index.as_retriever(similarity_top_k=1).retrieve(question)[0].text
        assert {hit.text for hit in hybrid.retrieve(question)} == {by_words, by_meaning}
        differing += by_words != by_meaning
    assert differing


@pytest.mark.contract
async def test_hybrid_search_in_qdrants_async_methods(
    sparse: MillpondSparseEmbedding, engine: Engine, texts: list[str], recorder: Any
) -> None:
    embedding = MillpondEmbedding(engine=engine)
    store = QdrantVectorStore(
        "docs",
        aclient=AsyncQdrantClient(":memory:"),
        enable_hybrid=True,
        sparse_doc_fn=sparse.doc_fn,
        sparse_query_fn=sparse.query_fn,
    )
    await store.async_add(list(await embedding.acall(nodes_of(texts))))
    assert len(recorder.of(SparseEmbeddingEndEvent)) == 1  # the whole batch in one call of the engine
    found = await store.aquery(
        VectorStoreQuery(query_str=QUESTION, sparse_top_k=12, similarity_top_k=12, mode=VectorStoreQueryMode.SPARSE)
    )
    query = sparse.get_query_embedding(QUESTION)
    expected = sorted((inner(query, own) for own in sparse.get_text_embedding_batch(texts)), reverse=True)
    assert found.similarities == pytest.approx(expected, rel=1e-4)
