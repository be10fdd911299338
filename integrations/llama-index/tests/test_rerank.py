"""MillpondRerank: the engine's scores on LlamaIndex's nodes, its events, and the second stage of a query engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from pydantic import ValidationError
from tests.adapters import QUESTION, TEMPLATE

from llama_index.postprocessor.millpond_rerank import MillpondRerank
from millpond import Engine
from millpond.errors import InvalidRequestError, ModelLoadError

Process = Callable[..., list[NodeWithScore]]


@pytest.fixture(params=["sync", "async"])
def process(request: pytest.FixtureRequest) -> Process:
    """The sync and the async method of the postprocessor."""

    def call(reranker: MillpondRerank, hits: list[NodeWithScore], query: str | None = QUESTION) -> list[NodeWithScore]:
        if request.param == "sync":
            return reranker.postprocess_nodes(hits, query_str=query)
        return asyncio.run(reranker.apostprocess_nodes(hits, query_str=query))

    return call


def read(hits: list[NodeWithScore]) -> list[str]:
    """The text of the nodes that a model reads."""
    return [hit.node.get_content(metadata_mode=MetadataMode.EMBED) for hit in hits]


@pytest.mark.parametrize("method", ["auto", "cosine", "maxsim"])
def test_a_method_is_the_engines_method_of_rerank(
    engine: Engine, process: Process, hits: list[NodeWithScore], method: Any
) -> None:
    expected = engine.rerank(QUESTION, read(hits), method=method)
    reranker = MillpondRerank(engine=engine, top_n=None, method=method)
    found = process(reranker, hits)
    assert [hit.node.metadata["n"] for hit in found] == [result.index for result in expected]
    np.testing.assert_allclose([hit.score for hit in found], [result.relevance_score for result in expected], atol=1e-4)
    assert (found[0].get_score() > 1.1) is (method != "cosine")  # the two measures differ
    assert f"method='{method}'" in repr(reranker)
    assert MillpondRerank.from_dict(reranker.to_dict(), engine=engine).method == method


def test_a_node_is_read_as_an_embedding_model_reads_it(engine: Engine, process: Process) -> None:
    def hit(**options: Any) -> NodeWithScore:
        return NodeWithScore(node=TextNode(text="It rises.", metadata={"subject": "bread dough"}, **options), score=0.5)

    seen, hidden = hit(excluded_llm_metadata_keys=["subject"]), hit(excluded_embed_metadata_keys=["subject"])
    found = process(MillpondRerank(engine=engine, top_n=None), [hidden, seen])
    expected = engine.rerank(QUESTION, ["subject: bread dough\n\nIt rises.", "It rises."], method="maxsim")
    assert [one.node.id_ for one in found] == [seen.node.id_, hidden.node.id_]
    np.testing.assert_allclose([one.score for one in found], [one.relevance_score for one in expected], atol=1e-4)


@pytest.mark.parametrize("kept", [False, True])
def test_the_callers_nodes_are_left_alone(
    engine: Engine, process: Process, hits: list[NodeWithScore], kept: bool
) -> None:
    before = copy.deepcopy(hits)
    found = process(MillpondRerank(engine=engine, keep_retrieval_score=kept), hits)
    assert [hit.to_dict() for hit in hits] == [hit.to_dict() for hit in before]
    assert len(found) == 3
    for hit in found:
        original = hits[hit.node.metadata["n"]]
        assert hit is not original
        assert (hit.node.id_, hit.text) == (original.node.id_, original.text)
        extra = {"retrieval_score": original.score} if kept else {}
        assert hit.node.metadata == {**original.node.metadata, **extra}
        for mode in (MetadataMode.EMBED, MetadataMode.LLM):  # no model reads the score
            assert hit.node.get_content(metadata_mode=mode) == original.node.get_content(metadata_mode=mode)


def test_how_many_are_kept(engine: Engine, process: Process, hits: list[NodeWithScore]) -> None:
    def order(found: list[NodeWithScore]) -> list[str]:
        return [hit.node.id_ for hit in found]

    whole = process(MillpondRerank(engine=engine, top_n=None), hits)
    assert len(whole) == len(hits)
    assert order(process(MillpondRerank(engine=engine, top_n=2), hits)) == order(whole)[:2]
    assert order(process(MillpondRerank(engine=engine, top_n=99), hits)) == order(whole)


def test_within_a_budget_nodes_may_have_no_score(engine: Engine, process: Process, hits: list[NodeWithScore]) -> None:
    none = process(MillpondRerank(engine=engine, top_n=3, budget_ms=1e-9), hits)
    assert [hit.node.id_ for hit in none] == [hit.node.id_ for hit in hits[:3]]
    assert [hit.score for hit in none] == [None] * 3
    every = process(MillpondRerank(engine=engine, top_n=None, budget_ms=3.6e6), hits)
    whole = process(MillpondRerank(engine=engine, top_n=None), hits)
    assert [hit.score for hit in every] == pytest.approx([hit.score for hit in whole], rel=1e-4)


def test_without_a_query_nothing_is_ranked(engine: Engine, process: Process, hits: list[NodeWithScore]) -> None:
    with pytest.raises(ValueError, match="needs the query"):
        process(MillpondRerank(engine=engine), hits, None)


@pytest.mark.parametrize(("style", "empty"), [("sync", False), ("async", False), ("sync", True)])
async def test_every_start_has_its_end(
    engine: Engine, hits: list[NodeWithScore], recorder: Any, style: str, empty: bool
) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    reranker = MillpondRerank(engine=engine, top_n=2, callback_manager=CallbackManager([debug]))
    given = [] if empty else hits
    bundle = QueryBundle(QUESTION)
    if style == "sync":
        found = reranker.postprocess_nodes(given, query_bundle=bundle)
    else:
        found = await reranker.apostprocess_nodes(given, query_bundle=bundle)
    (start,), (end,) = recorder.of(ReRankStartEvent), recorder.of(ReRankEndEvent)
    assert (start.top_n, start.model_name, len(start.nodes)) == (2, engine.spec.name, len(given))
    assert start.query.query_str == QUESTION
    assert [hit.node.id_ for hit in end.nodes] == [hit.node.id_ for hit in found]
    assert len(found) == (0 if empty else 2)
    ((first, last),) = debug.get_event_pairs(CBEventType.RERANKING)
    assert first.payload[EventPayload.QUERY_STR] == QUESTION
    assert last.payload[EventPayload.NODES] == found


def test_no_nodes_no_model(process: Process, hits: list[NodeWithScore]) -> None:
    absent = MillpondRerank(model="./no-such-folder")
    assert process(absent, []) == []
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        process(absent, hits)


def test_options_reach_the_engine(cross_encoder: str, process: Process, hits: list[NodeWithScore]) -> None:
    options: dict[str, Any] = {"model": cross_encoder, "dtype": "float32"}
    raw = np.array([hit.score for hit in process(MillpondRerank(**options), hits)])
    squashed = [hit.score for hit in process(MillpondRerank(**options, activation="sigmoid"), hits)]
    np.testing.assert_allclose(squashed, 1 / (1 + np.exp(-raw)), atol=1e-5)
    template = {**options, "score_template": TEMPLATE}
    scores = [
        [hit.get_score() for hit in process(MillpondRerank(**template, instruction=each), hits)]
        for each in (None, "wheel", "tides")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5) != pytest.approx(scores[2], abs=1e-3)
    with pytest.raises(InvalidRequestError, match="instruction='be kind'"):
        process(MillpondRerank(**options, instruction="be kind"), hits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model= .* or engine="),
        ({"model": ""}, "at least 1"),
        ({"model": "a", "top_k": 3}, "top_k=.* is not available here"),
        ({"model": "a", "top_n": 0}, "greater than 0"),
        ({"model": "a", "truncate": "middle"}, "'end', 'start' or 'error'"),
        ({"model": "a", "method": "dot"}, "'auto', 'cosine' or 'maxsim'.*input_value='dot'"),
        ({"model": "a", "activation": "tanh"}, "'identity', 'sigmoid' or 'softmax'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, TypeError), match=message):
        MillpondRerank(**options)
