"""The adapters inside LlamaIndex's own parts: settings, splitters, query engines, fusion and recursive retrieval."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.embeddings import resolve_embed_model
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SemanticSplitterNodeParser
from llama_index.core.retrievers import QueryFusionRetriever, RecursiveRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import IndexNode, NodeWithScore, TextNode
from tests.adapters import QUESTION

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from llama_index.retrievers.millpond import MillpondColBERTRetriever
from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
from millpond import Engine
from millpond.late_interaction import MemoryIndex

ANSWER = "Bread rises because yeast turns sugar into carbon dioxide."


@pytest.fixture
def settings() -> Iterator[None]:
    """LlamaIndex's settings are restored."""
    before = (Settings._embed_model, Settings._llm)
    Settings.llm = MockLLM()
    yield
    Settings._embed_model, Settings._llm = before


@pytest.fixture
def embedding(engine: Engine) -> MillpondEmbedding:
    return MillpondEmbedding(engine=engine)


def nodes_of(texts: list[str]) -> list[TextNode]:
    return [TextNode(id_=f"node-{n}", text=text) for n, text in enumerate(texts)]


def found_texts(hits: list[NodeWithScore]) -> list[str]:
    return [hit.text for hit in hits]


@pytest.mark.torch
def test_resolve_embed_model_takes_the_object_and_local_is_hugging_faces(
    minilm: str, embedding: MillpondEmbedding, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert resolve_embed_model(embedding) is embedding
    with pytest.raises(ValueError, match="must start with str 'local' or of type BaseEmbedding"):
        resolve_embed_model(f"millpond:{minilm}")
    module = pytest.importorskip("llama_index.embeddings.huggingface")
    monkeypatch.setenv("LLAMA_INDEX_CACHE_DIR", str(tmp_path))
    local = resolve_embed_model(f"local:{minilm}")
    assert type(local) is module.HuggingFaceEmbedding
    # The line to write instead gives the same vectors.
    instead = MillpondEmbedding(minilm, dtype="float32")
    np.testing.assert_allclose(instead.get_text_embedding("tides"), local.get_text_embedding("tides"), atol=2e-5)


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_the_semantic_splitter_cuts_between_subjects(embedding: MillpondEmbedding, style: str) -> None:
    text = (
        "Yeast turns sugar into carbon dioxide. The gas makes the dough rise. The baker kneads the dough again. "
        "A socket connects two processes. The network carries its packets. The server closes the connection. "
    )
    splitter = SemanticSplitterNodeParser(
        embed_model=embedding,
        buffer_size=1,
        breakpoint_percentile_threshold=80,
        sentence_splitter=lambda whole: [f"{part}. " for part in whole.split(". ") if part.strip()],
    )
    documents = [Document(text=text)]
    nodes = (
        splitter.get_nodes_from_documents(documents)
        if style == "sync"
        else await splitter.aget_nodes_from_documents(documents)
    )
    # A group of sentences at the border has some of both subjects, so the cut is there or one further.
    first, second = (node.get_content() for node in nodes)
    assert "baker" in first
    assert "packets" in second
    assert "packets" not in first


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_a_query_engine_reranks_what_it_retrieves(
    embedding: MillpondEmbedding, engine: Engine, texts: list[str], style: str
) -> None:
    index = VectorStoreIndex(nodes_of(texts), embed_model=embedding)
    reranker = MillpondRerank(engine=engine, top_n=2, method="maxsim")
    query_engine = index.as_query_engine(similarity_top_k=6, node_postprocessors=[reranker], llm=MockLLM())
    response = query_engine.query(QUESTION) if style == "sync" else await query_engine.aquery(QUESTION)
    candidates = found_texts(index.as_retriever(similarity_top_k=6).retrieve(QUESTION))
    expected = engine.rerank(QUESTION, candidates, top_n=2, method="maxsim")
    assert found_texts(response.source_nodes) == [result.document for result in expected]
    assert ANSWER in str(response)


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_a_fusion_of_two_retrievers(
    embedding: MillpondEmbedding, engine: Engine, texts: list[str], style: str
) -> None:
    dense = VectorStoreIndex(nodes_of(texts), embed_model=embedding).as_retriever(similarity_top_k=4)
    colbert = MillpondColBERTRetriever(MemoryIndex(engine), 4)
    colbert.add_nodes(nodes_of(texts))
    fusion = QueryFusionRetriever(
        [dense, colbert],
        llm=MockLLM(),
        num_queries=1,
        similarity_top_k=12,
        mode=FUSION_MODES.RECIPROCAL_RANK,
        use_async=False,
    )
    fused = fusion.retrieve(QUESTION) if style == "sync" else await fusion.aretrieve(QUESTION)
    assert fused[0].text == ANSWER
    expected = {hit.node.node_id for one in (dense, colbert) for hit in one.retrieve(QUESTION)}
    assert {hit.node.node_id for hit in fused} == expected


@pytest.mark.parametrize("style", ["sync", "async"])
async def test_the_colbert_retriever_enters_the_objects_of_index_nodes(
    engine: Engine, texts: list[str], style: str
) -> None:
    inner = MillpondColBERTRetriever(MemoryIndex(engine), 1)
    inner.add_nodes(nodes_of(texts))
    summaries = [
        IndexNode(id_="baking", index_id="baking", text="All about bread, dough and yeast.", obj=inner),
        IndexNode(id_="sea", index_id="sea", text="All about tides and glaciers."),
    ]
    index = MemoryIndex(engine)
    adding = MillpondColBERTRetriever(index, 1)
    adding.add_nodes(summaries)
    assert summaries[0].obj is inner
    for outer in (adding, MillpondColBERTRetriever(index, 1, objects=summaries)):
        hits = outer.retrieve(QUESTION) if style == "sync" else await outer.aretrieve(QUESTION)
        assert found_texts(hits) == [ANSWER]
    plain = MillpondColBERTRetriever(index, 1)
    hits = plain.retrieve(QUESTION) if style == "sync" else await plain.aretrieve(QUESTION)
    assert (hits[0].node.node_id, type(hits[0].node)) == ("baking", IndexNode)  # without its object: the node itself
    recursive = RecursiveRetriever("root", retriever_dict={"root": plain, "baking": inner})
    assert ANSWER in found_texts(recursive.retrieve(QUESTION))


async def test_retrieval_has_its_events(engine: Engine, texts: list[str], recorder: Any) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    retriever = MillpondColBERTRetriever(MemoryIndex(engine), 2, callback_manager=CallbackManager([debug]))
    retriever.add_nodes(nodes_of(texts))
    first = retriever.retrieve(QUESTION)
    second = await retriever.aretrieve(QUESTION)
    starts, ends = recorder.of(RetrievalStartEvent), recorder.of(RetrievalEndEvent)
    assert [start.str_or_query_bundle for start in starts] == [QUESTION, QUESTION]
    assert [end.nodes for end in ends] == [first, second]
    pairs = debug.get_event_pairs(CBEventType.RETRIEVE)
    assert [pair[0].payload[EventPayload.QUERY_STR] for pair in pairs] == [QUESTION, QUESTION]


@pytest.mark.parametrize(
    "value", ["tides", "", TextNode(text="tides"), {"a": 1}, 3], ids=["str", "empty", "node", "dict", "int"]
)
def test_a_single_item_is_no_list_in_any_method(engine: Engine, value: Any) -> None:
    embedding, reranker = MillpondEmbedding(engine=engine), MillpondRerank(engine=engine)
    sparse = MillpondSparseEmbedding("not/loaded")
    retriever = MillpondColBERTRetriever(MemoryIndex(engine))
    calls = {
        "get_text_embedding_batch": lambda: embedding.get_text_embedding_batch(value),
        "aget_text_embedding_batch": lambda: asyncio.run(embedding.aget_text_embedding_batch(value)),
        "get_agg_embedding_from_queries": lambda: embedding.get_agg_embedding_from_queries(value),
        "aget_agg_embedding_from_queries": lambda: asyncio.run(embedding.aget_agg_embedding_from_queries(value)),
        "doc_fn": lambda: sparse.doc_fn(value),
        "query_fn": lambda: sparse.query_fn(value),
        "postprocess_nodes": lambda: reranker.postprocess_nodes(value, query_str=QUESTION),
        "apostprocess_nodes": lambda: asyncio.run(reranker.apostprocess_nodes(value, query_str=QUESTION)),
        "add_nodes": lambda: retriever.add_nodes(value),
        "delete_nodes": lambda: retriever.delete_nodes(value),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name} takes a list of \w+, not a {type(value).__name__};"):
            call()


async def test_an_aggregate_of_queries_is_their_mean(embedding: MillpondEmbedding, engine: Engine) -> None:
    queries = [QUESTION, "yeast", "tides"]
    expected = engine.embed(queries, role="query").embeddings.mean(axis=0)
    np.testing.assert_allclose(embedding.get_agg_embedding_from_queries(queries), expected, atol=1e-6)
    np.testing.assert_allclose(await embedding.aget_agg_embedding_from_queries(queries), expected, atol=1e-6)
    first = await embedding.aget_agg_embedding_from_queries(queries, agg_fn=lambda vectors: vectors[0])
    np.testing.assert_allclose(first, engine.embed(queries[:1], role="query").embeddings[0], atol=1e-6)


def test_lists_of_other_kinds_are_lists(embedding: MillpondEmbedding, texts: list[str]) -> None:
    expected = embedding.get_text_embedding_batch(texts)
    for value in (tuple(texts), np.array(texts), (text for text in texts), dict.fromkeys(texts).keys()):
        np.testing.assert_allclose(embedding.get_text_embedding_batch(value), expected, atol=1e-6)  # type: ignore[arg-type]
