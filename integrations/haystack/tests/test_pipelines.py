"""The components in Haystack's own pipelines: indexed and asked in two stages, written to YAML and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.components.writers import DocumentWriter
from haystack.core.errors import SerializationError
from haystack.document_stores.in_memory import InMemoryDocumentStore
from sentence_transformers import SentenceTransformer

from haystack_integrations.components.embedders.millpond import (
    MillpondDocumentEmbedder,
    MillpondSparseDocumentEmbedder,
    MillpondSparseTextEmbedder,
    MillpondTextEmbedder,
)
from haystack_integrations.components.rankers.millpond import MillpondLateInteractionRanker, MillpondSimilarityRanker
from haystack_integrations.components.retrievers.millpond import MillpondIndexRetriever
from millpond import Engine
from millpond.late_interaction import PlaidIndex

pytestmark = pytest.mark.door

QUESTION = "What makes dough rise?"
ANSWER = "Bread rises because yeast turns sugar into carbon dioxide."


def indexed(store: InMemoryDocumentStore, embedder: Any, texts: list[str]) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("embedder", embedder)
    pipeline.add_component("writer", DocumentWriter(store))
    pipeline.connect("embedder.documents", "writer.documents")
    documents = [Document(id=f"d{n}", content=text, meta={"n": n}) for n, text in enumerate(texts)]
    assert pipeline.run({"embedder": {"documents": documents}})["writer"]["documents_written"] == len(texts)
    assert all(document.embedding is None for document in documents)  # copies are embedded
    return pipeline


def two_stages(store: InMemoryDocumentStore, embedder: Any, ranker: Any) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("embedder", embedder)
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=6))
    pipeline.add_component("ranker", ranker)
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    return pipeline


def asked(found: Any) -> dict[str, float]:
    return {document.id: document.score for document in found["ranker"]["documents"]}


async def test_two_stages_are_indexed_asked_written_and_read_again(minilm: str, texts: list[str]) -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    indexing = indexed(store, MillpondDocumentEmbedder(minilm, dtype="float32"), texts)
    pipeline = two_stages(
        store,
        MillpondTextEmbedder(minilm, dtype="float32"),
        MillpondLateInteractionRanker(minilm, dtype="float32", top_k=3, score_threshold=0.0),
    )
    question = {"embedder": {"text": QUESTION}, "ranker": {"query": QUESTION}}
    answers = asked(pipeline.run(question))
    assert next(iter(answers)) == f"d{texts.index(ANSWER)}" and len(answers) == 3
    assert list(answers.values()) == sorted(answers.values(), reverse=True)

    awaited = asked(await pipeline.run_async(question))
    assert awaited == pytest.approx(answers, rel=1e-6) and list(awaited) == list(answers)
    written = pipeline.dumps()
    again = Pipeline.loads(written)
    assert again.dumps() == written
    again.remove_component("retriever")  # the store of a loaded pipeline is another, empty one
    again.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=6))
    again.connect("embedder.embedding", "retriever.query_embedding")
    again.connect("retriever.documents", "ranker.documents")
    assert asked(again.run(question)) == pytest.approx(answers, rel=1e-6)

    loaded = Pipeline.loads(indexing.dumps())
    assert loaded.dumps() == indexing.dumps()
    embedder = loaded.get_component("embedder")
    assert embedder._source.load() is indexing.get_component("embedder")._source.load()  # equal options share an engine


def test_the_vectors_are_those_of_sentence_transformers(prompted: str, texts: list[str]) -> None:
    oracle = SentenceTransformer(prompted, device="cpu")
    documents = [Document(content=text, meta={"title": f"No. {n}"}) for n, text in enumerate(texts)]
    embedder = MillpondDocumentEmbedder(
        prompted, dtype="float32", meta_fields_to_embed=["title", "absent"], embedding_separator=" | ", suffix="!"
    )
    made = np.array([document.embedding for document in embedder.run(documents)["documents"]])
    read = [f"No. {n} | {text}!" for n, text in enumerate(texts)]
    np.testing.assert_allclose(made, oracle.encode(read, prompt_name="document"), atol=1e-5)
    assert np.abs(made - oracle.encode(read, prompt_name="query")).max() > 1e-3  # another role is another vector
    assert np.abs(made - oracle.encode(texts, prompt_name="document")).max() > 1e-3

    asked = MillpondTextEmbedder(prompted, dtype="float32").run(QUESTION)
    np.testing.assert_allclose(asked["embedding"], oracle.encode(QUESTION, prompt_name="query"), atol=1e-5)
    assert asked["meta"] == {"model": prompted}
    for prefix in ("find: ", ""):  # instead of the checkpoint's prompt
        vector = MillpondTextEmbedder(prompted, dtype="float32", prefix=prefix).run(QUESTION)["embedding"]
        np.testing.assert_allclose(vector, oracle.encode(QUESTION, prompt=prefix), atol=1e-5)


async def test_the_sparse_twins_weigh_as_the_engine(
    prompted_splade: str, splade_engine: Engine, texts: list[str]
) -> None:
    documents = [Document(content=text) for text in texts[:4]]
    writer = MillpondSparseDocumentEmbedder(prompted_splade, dtype="float32")
    asker = MillpondSparseTextEmbedder(prompted_splade, dtype="float32")
    roles = {role: splade_engine.sparse_embed([QUESTION], role=role)[0] for role in ("query", "document")}
    assert roles["query"] != roles["document"]
    for found in (asker.run(QUESTION), await asker.run_async(QUESTION)):
        sparse = found["sparse_embedding"]
        assert dict(zip(sparse.indices, sparse.values, strict=True)) == pytest.approx(roles["query"], abs=1e-5)
        assert sparse.indices == sorted(sparse.indices)
    expected = splade_engine.sparse_embed(texts[:4], role="document")
    for found in (writer.run(documents), await writer.run_async(documents)):
        for document, row in zip(found["documents"], expected, strict=True):
            sparse = document.sparse_embedding
            assert dict(zip(sparse.indices, sparse.values, strict=True)) == pytest.approx(row, abs=1e-5)
    assert all(document.sparse_embedding is None for document in documents)


def test_every_component_is_written_and_read_again(minilm: str, cross_encoder: str, prompted_splade: str) -> None:
    pipeline = Pipeline()
    for name, made in {
        "text": MillpondTextEmbedder(minilm, suffix=".", dimensions=64, hf_overrides={"is_matryoshka": True}),
        "documents": MillpondDocumentEmbedder(minilm, prefix="passage: ", meta_fields_to_embed=["title"]),
        "sparse": MillpondSparseTextEmbedder(prompted_splade),
        "sparse documents": MillpondSparseDocumentEmbedder(prompted_splade, embedding_separator=" "),
        "ranker": MillpondSimilarityRanker(cross_encoder, top_k=None, scale_score=False, query_prefix="q"),
        "late": MillpondLateInteractionRanker(minilm, score_threshold=0.5),
        "retriever": MillpondIndexRetriever("folder", model=minilm, filters={"n": {"gte": 2}}, candidates=50),
    }.items():
        pipeline.add_component(name, made)
    again = Pipeline.loads(pipeline.dumps())
    assert again.dumps() == pipeline.dumps()
    for name in pipeline.graph.nodes:
        one, other = pipeline.get_component(name), again.get_component(name)
        assert (one._own, one._source) == (other._own, other._source) and type(one) is type(other), name
    assert again.get_component("documents")._source.document_prompt == "passage: "


def test_an_engine_or_an_index_is_not_written(engine: Engine, tmp_path: Path) -> None:
    index = PlaidIndex(tmp_path / "index", engine)
    for made in (
        MillpondTextEmbedder(engine=engine),
        MillpondSimilarityRanker(engine=engine),
        MillpondIndexRetriever("folder", engine=engine),
    ):
        pipeline = Pipeline()
        pipeline.add_component("it", made)
        with pytest.raises(SerializationError, match=f"{type(made).__name__}: engine= cannot be serialized.*model="):
            pipeline.dumps()
    with pytest.raises(SerializationError, match="a PlaidIndex cannot be serialized; pass its folder or URL"):
        MillpondIndexRetriever(index).to_dict()
    index.close()
