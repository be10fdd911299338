"""MillpondEmbedding inside LlamaIndex: events, ingestion pipelines, a vector store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_index.core.instrumentation as instrument
import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent, EmbeddingStartEvent
from llama_index.core.schema import TextNode
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import Field
from qdrant_client import QdrantClient

from llama_index.embeddings.millpond import MillpondEmbedding
from millpond import Engine

QUESTION = "What makes dough rise?"


class Recorder(BaseEventHandler):
    """Records every embedding event."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, EmbeddingStartEvent | EmbeddingEndEvent):
            self.events.append(event)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    dispatcher = instrument.get_dispatcher()
    recorder = Recorder()
    before = list(dispatcher.event_handlers)
    dispatcher.add_event_handler(recorder)
    yield recorder
    dispatcher.event_handlers = before


def nodes_of(texts: list[str]) -> list[TextNode]:
    return [TextNode(text=text) for text in texts]


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_every_start_has_its_end(engine: Engine, texts: list[str], recorder: Recorder, style: str) -> None:
    embedding = MillpondEmbedding(engine=engine, embed_batch_size=5)
    if style == "sync":
        vectors = embedding.get_text_embedding_batch(texts)
        vectors.append(embedding.get_query_embedding(QUESTION))
    else:
        vectors = await embedding.aget_text_embedding_batch(texts)
        vectors.append(await embedding.aget_query_embedding(QUESTION))
    starts = [event for event in recorder.events if isinstance(event, EmbeddingStartEvent)]
    ends = [event for event in recorder.events if isinstance(event, EmbeddingEndEvent)]
    assert [len(end.chunks) for end in ends] == [5, 5, 2, 1]
    assert [vector for end in ends for vector in end.embeddings] == vectors
    assert [start.model_dict["model_name"] for start in starts] == [engine.spec.name] * 4
    assert all(set(start.model_dict) == {"class_name", "model_name", "embed_batch_size"} for start in starts)


def test_callbacks(engine: Engine, texts: list[str]) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    embedding = MillpondEmbedding(engine=engine, embed_batch_size=5, callback_manager=CallbackManager([debug]))
    embedding.get_text_embedding_batch(texts)
    assert len(debug.get_event_pairs(CBEventType.EMBEDDING)) == 3


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_a_pipeline_into_qdrant(prompted: str, engine: Engine, texts: list[str]) -> None:
    embedding = MillpondEmbedding(model_name=prompted, dtype="float32")
    store = QdrantVectorStore(client=QdrantClient(":memory:"), collection_name="docs")
    IngestionPipeline(transformations=[embedding], vector_store=store).run(nodes=nodes_of(texts))

    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    hits = index.as_retriever(similarity_top_k=12).retrieve(QUESTION)
    documents = engine.embed(texts, prompt="search_document: ").embeddings
    query = engine.embed([QUESTION], prompt="search_query: ").embeddings[0]
    scores = documents @ query / (np.linalg.norm(documents, axis=1) * np.linalg.norm(query))
    order = np.argsort(-scores)
    assert [hit.text for hit in hits] == [texts[i] for i in order]
    np.testing.assert_allclose([hit.score for hit in hits], scores[order], atol=1e-5)


@pytest.mark.contract
@pytest.mark.slow
def test_a_pipeline_in_several_processes(minilm: str, engine: Engine, texts: list[str]) -> None:
    embedding = MillpondEmbedding(model_name=minilm, dtype="float32")
    nodes = IngestionPipeline(transformations=[embedding], disable_cache=True).run(nodes=nodes_of(texts), num_workers=2)
    assert {node.get_content() for node in nodes} == set(texts)
    expected = engine.embed([node.get_content() for node in nodes]).embeddings
    np.testing.assert_allclose([node.embedding for node in nodes], expected, atol=1e-6)
