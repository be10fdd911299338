"""MillpondEmbedding in an IngestionPipeline: what a second run embeds, what a changed document replaces, processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent, EmbeddingStartEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import AsyncQdrantClient, QdrantClient
from tests.adapters import QUESTION

from llama_index.embeddings.millpond import MillpondEmbedding
from millpond import Engine

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")


def documents_of(texts: Sequence[str]) -> list[Document]:
    """Documents with ids, which are UUIDs: Qdrant takes no others, and a document that is not split keeps its own."""
    return [Document(text=text, doc_id=_document_id(i)) for i, text in enumerate(texts)]


def _document_id(number: int) -> str:
    return f"00000000-0000-0000-0000-{number:012}"


class Counting:
    """An embedding over an engine of its own, and the texts that this engine was given."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.embedding = MillpondEmbedding(engine=engine, **options)
        self._before = engine.stats().texts_done

    def texts(self) -> int:
        """Texts embedded since the last call."""
        before, self._before = self._before, self.engine.stats().texts_done
        return self._before - before


@pytest.fixture
def counting(engine: Engine) -> Counting:
    return Counting(engine)


class Store:
    """A Qdrant store in memory for one style of calls, and its points."""

    def __init__(self, style: str, runner: asyncio.Runner) -> None:
        self.style = style
        self.await_ = runner.run
        if style == "sync":
            self.client: Any = QdrantClient(":memory:")
            self.store = QdrantVectorStore("docs", client=self.client)
        else:
            self.client = AsyncQdrantClient(":memory:")
            self.store = QdrantVectorStore("docs", aclient=self.client)

    def run(self, pipeline: IngestionPipeline, documents: list[Document]) -> Sequence[BaseNode]:
        if self.style == "sync":
            return pipeline.run(documents=documents)
        return self.await_(pipeline.arun(documents=documents))

    def points(self) -> dict[str, list[str]]:
        """The texts of the nodes of every document."""
        found = self.client.scroll("docs", limit=1000)
        if self.style == "async":
            found = self.await_(found)
        texts: dict[str, list[str]] = {}
        for point in found[0]:
            node = TextNode.from_json(point.payload["_node_content"])
            texts.setdefault(point.payload["ref_doc_id"], []).append(node.text)
        return {document: sorted(own) for document, own in texts.items()}


@pytest.fixture(params=["sync", "async"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with asyncio.Runner() as runner:
        yield Store(request.param, runner)


def splitter() -> SentenceSplitter:
    """Two sentences or so of a document in each node, counted in words."""
    return SentenceSplitter(chunk_size=12, chunk_overlap=0, tokenizer=str.split)


def two_each(texts: Sequence[str]) -> list[Document]:
    """Documents of two nodes each."""
    return documents_of([f"{first} {second}" for first, second in zip(texts[::2], texts[1::2], strict=True)])


def test_a_second_run_embeds_nothing(counting: Counting, store: Store, texts: list[str]) -> None:
    def pipeline() -> IngestionPipeline:
        return IngestionPipeline(
            transformations=[splitter(), counting.embedding],
            docstore=docstore,
            vector_store=store.store,
            docstore_strategy=DocstoreStrategy.UPSERTS,
        )

    docstore = SimpleDocumentStore()
    first = store.run(pipeline(), two_each(texts))
    assert counting.texts() == len(first) > 6
    points = store.points()
    assert sum(map(len, points.values())) == len(first)
    again = store.run(pipeline(), two_each(texts))  # a new pipeline, so its cache is empty
    assert list(again) == []
    assert counting.texts() == 0
    assert store.points() == points


def test_a_changed_document_is_replaced_and_only_it_is_embedded(
    counting: Counting, store: Store, texts: list[str]
) -> None:
    pipeline = IngestionPipeline(
        transformations=[splitter(), counting.embedding],
        docstore=SimpleDocumentStore(),
        vector_store=store.store,
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    store.run(pipeline, two_each(texts))
    before = store.points()
    counting.texts()
    changed = two_each(texts)
    changed[2] = Document(text="Salt lowers the freezing point of water.", doc_id=_document_id(2))
    found = store.run(pipeline, changed)
    assert counting.texts() == len(found) == 1
    expected = counting.engine.embed(["Salt lowers the freezing point of water."]).embeddings[0]
    np.testing.assert_allclose(np.array(found[0].embedding), expected, atol=1e-6)
    assert store.points() == {**before, _document_id(2): ["Salt lowers the freezing point of water."]}


def test_one_more_document_embeds_one_with_the_models_cache(minilm: str, tmp_path: Path, texts: list[str]) -> None:
    # LlamaIndex's own cache has one entry for the whole list of nodes, and so embeds all of it again.
    pipelines_cache = IngestionCache()
    embedding = MillpondEmbedding(minilm, dtype="float32", cache=tmp_path / "vectors.db")
    embedded = []
    for count in (4, 5, 5):
        before = embedding._engine().stats()
        nodes = IngestionPipeline(transformations=[embedding], cache=pipelines_cache).run(
            documents=documents_of(texts[:count])
        )
        after = embedding._engine().stats()
        embedded.append((after.texts_done - before.texts_done, after.batch_texts - before.batch_texts))
        assert len(nodes) == count
    assert embedded == [(4, 4), (5, 1), (0, 0)]


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_every_start_has_its_end(engine: Engine, texts: list[str], recorder: Any, style: str) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    embedding = MillpondEmbedding(engine=engine, embed_batch_size=5, callback_manager=CallbackManager([debug]))
    if style == "sync":
        vectors = embedding.get_text_embedding_batch(texts)
        vectors.append(embedding.get_query_embedding(QUESTION))
    else:
        vectors = await embedding.aget_text_embedding_batch(texts)
        vectors.append(await embedding.aget_query_embedding(QUESTION))
    starts, ends = recorder.of(EmbeddingStartEvent), recorder.of(EmbeddingEndEvent)
    assert [len(end.chunks) for end in ends] == [5, 5, 2, 1]
    assert [vector for end in ends for vector in end.embeddings] == vectors
    assert [start.model_dict["model_name"] for start in starts] == [engine.spec.name] * 4
    assert all(set(start.model_dict) == {"class_name", "model_name", "embed_batch_size"} for start in starts)
    assert len(debug.get_event_pairs(CBEventType.EMBEDDING)) == 4


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_a_pipeline_into_qdrant(prompted: str, engine: Engine, texts: list[str]) -> None:
    embedding = MillpondEmbedding(model_name=prompted, dtype="float32")
    store = QdrantVectorStore(client=QdrantClient(":memory:"), collection_name="docs")
    IngestionPipeline(transformations=[embedding], vector_store=store).run(
        nodes=[TextNode(text=text) for text in texts]
    )

    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    hits = index.as_retriever(similarity_top_k=12).retrieve(QUESTION)
    documents = engine.embed(texts, prompt="search_document: ").embeddings
    query = engine.embed([QUESTION], prompt="search_query: ").embeddings[0]
    scores = documents @ query / (np.linalg.norm(documents, axis=1) * np.linalg.norm(query))
    order = np.argsort(-scores)
    assert [hit.text for hit in hits] == [texts[i] for i in order]
    np.testing.assert_allclose([hit.score for hit in hits], scores[order], atol=1e-5)


def test_an_empty_run_loads_no_model() -> None:
    pipeline = IngestionPipeline(transformations=[MillpondEmbedding("./no-such-folder")])
    assert pipeline.run(documents=[]) == []
    assert asyncio.run(pipeline.arun(documents=[])) == []


def test_a_loaded_embedding_with_locks_is_pickled_whole(minilm: str, caplog: pytest.LogCaptureFixture) -> None:
    built = MillpondEmbedding(minilm, dtype="float32", query_prompt="ask: ")
    expected = built.get_query_embedding("tides")  # loads the engine, which has locks and threads
    pipeline = IngestionPipeline(transformations=[built])
    (after,) = pickle.loads(pickle.dumps(pipeline.transformations))
    assert after._engine() is built._engine()
    assert after.get_query_embedding("tides") == pytest.approx(expected, abs=1e-6)
    assert not caplog.records
    # LlamaIndex's base class drops a limiter that holds a lock, and says so; the rest of the object is whole.
    built.rate_limiter = threading.Lock()
    after = pickle.loads(pickle.dumps(built))
    assert [record.message for record in caplog.records] == ["Removing unpickleable attribute rate_limiter"]
    assert (after.rate_limiter, after.query_prompt) == (None, "ask: ")
    assert after.get_query_embedding("tides") == pytest.approx(expected, abs=1e-6)


_WORKERS = """
import asyncio, sys
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import TextNode
from llama_index.embeddings.millpond import MillpondEmbedding


def main() -> None:
    embedding = MillpondEmbedding(sys.argv[1], dtype="float32")
    expected = embedding.get_text_embedding_batch(["tides", "yeast", "glaciers", "violins"])  # loads the model
    pipeline = IngestionPipeline(transformations=[embedding], disable_cache=True)
    nodes = [TextNode(text=text) for text in ("tides", "yeast", "glaciers", "violins")]
    if sys.argv[2] == "run":
        found = pipeline.run(nodes=nodes, num_workers=2)
    else:
        found = asyncio.run(pipeline.arun(nodes=nodes, num_workers=2))
    assert [node.text for node in found] == ["tides", "yeast", "glaciers", "violins"]
    for node, vector in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(node.embedding, vector, strict=True)) < 1e-5
    print("vectors equal")


if __name__ == "__main__":
    main()
"""


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["run", "arun"])
def test_num_workers_gives_the_same_vectors_and_each_worker_says_that_it_loads_a_model(
    minilm: str, tmp_path: Path, method: str
) -> None:
    # Two workers even where the machine has more cores than that, spawned by run and forked by arun.
    script = tmp_path / "workers.py"
    script.write_text(_WORKERS)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, minilm, method],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "vectors equal\n"
    assert done.stderr.count("is a worker process and loads a model of its own") == min(2, os.cpu_count() or 1)
