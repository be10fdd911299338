"""MillpondRerank: the engine's scores on LlamaIndex's nodes, its events, and the second stage of a query engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

import llama_index.core.instrumentation as instrument
import numpy as np
import pytest
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from pydantic import Field, ValidationError
from tests.gates import LoopGate, batches_through

from llama_index.postprocessor.millpond_rerank import MillpondRerank
from millpond import Engine
from millpond.engine.composite import comparison
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError

QUESTION = "What makes dough rise?"
TEMPLATE = (
    "{{ instruction or 'wheel' }} "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)

Process = Callable[..., list[NodeWithScore]]


@pytest.fixture(params=["sync", "async"])
def process(request: pytest.FixtureRequest) -> Process:
    """The sync and the async method of the postprocessor."""

    def call(reranker: MillpondRerank, hits: list[NodeWithScore], query: str | None = QUESTION) -> list[NodeWithScore]:
        if request.param == "sync":
            return reranker.postprocess_nodes(hits, query_str=query)
        return asyncio.run(reranker.apostprocess_nodes(hits, query_str=query))

    return call


@pytest.fixture
def hits(texts: list[str]) -> list[NodeWithScore]:
    """Retrieved nodes: each text with an optional score."""
    return [
        NodeWithScore(node=TextNode(id_=f"id-{i}", text=text, metadata={"n": i}), score=1 - i / 20)
        for i, text in enumerate(texts)
    ]


def read(hits: list[NodeWithScore]) -> list[str]:
    """The text of the nodes that a model reads."""
    return [hit.node.get_content(metadata_mode=MetadataMode.EMBED) for hit in hits]


class Recorder(BaseEventHandler):
    """Records every rerank event."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, ReRankStartEvent | ReRankEndEvent):
            self.events.append(event)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    dispatcher = instrument.get_dispatcher()  # type: ignore[attr-defined]
    recorder = Recorder()
    before = list(dispatcher.event_handlers)
    dispatcher.add_event_handler(recorder)
    yield recorder
    dispatcher.event_handlers = before


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


def test_without_a_query_nothing_is_ranked(engine: Engine, process: Process, hits: list[NodeWithScore]) -> None:
    with pytest.raises(ValueError, match="needs the query"):
        process(MillpondRerank(engine=engine), hits, None)


@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("empty", [False, True])
async def test_every_start_has_its_end(
    engine: Engine, hits: list[NodeWithScore], recorder: Recorder, style: str, empty: bool
) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    reranker = MillpondRerank(engine=engine, top_n=2, callback_manager=CallbackManager([debug]))
    given = [] if empty else hits
    bundle = QueryBundle(QUESTION)
    if style == "sync":
        found = reranker.postprocess_nodes(given, query_bundle=bundle)
    else:
        found = await reranker.apostprocess_nodes(given, query_bundle=bundle)
    start, end = recorder.events
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
    with pytest.raises(InputTooLongError, match="max_length=9"):
        process(MillpondRerank(**options, max_length=9, truncate="error"), hits)
    with pytest.raises(InvalidRequestError, match="instruction='be kind'"):
        process(MillpondRerank(**options, instruction="be kind"), hits)


def test_an_instruction_fills_the_templates_slot(
    cross_encoder: str, process: Process, hits: list[NodeWithScore]
) -> None:
    def scores(**options: Any) -> list[float]:
        reranker = MillpondRerank(model=cross_encoder, dtype="float32", score_template=TEMPLATE, **options)
        return [hit.get_score() for hit in process(reranker, hits)]

    assert scores(instruction="wheel") == pytest.approx(scores(), abs=1e-5)
    assert scores(instruction="tides") != pytest.approx(scores(), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model= .* or engine="),
        ({"model": ""}, "at least 1"),
        ({"model": "a", "top_k": 3}, "top_k=.* is not available here"),
        ({"model": "a", "top_n": 0}, "greater than 0"),
        ({"model": "a", "top_n": True}, "valid integer"),
        ({"model": "a", "truncate": "middle"}, "'end', 'start' or 'error'"),
        ({"model": "a", "method": "dot"}, "'auto', 'cosine' or 'maxsim'.*input_value='dot'"),
        ({"model": "a", "method": None}, "'auto', 'cosine' or 'maxsim'"),
        ({"model": "a", "activation": "tanh"}, "'identity', 'sigmoid' or 'softmax'"),
        ({"model": "a", "engine": "b"}, "must be a millpond.Engine"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, TypeError), match=message):
        MillpondRerank(**options)


@pytest.mark.parametrize(("model", "count"), [("minilm", 40), ("cross_encoder", 300)])
async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str, count: int
) -> None:
    reranker = MillpondRerank(model=request.getfixturevalue(model), dtype="float32", top_n=None)
    many = [NodeWithScore(node=TextNode(text=f"the {i}th passage, about {i * i} things " * 4)) for i in range(count)]
    await reranker.apostprocess_nodes(many[:1], query_str=QUESTION)  # loads the model

    def refuse(*_: object) -> None:
        raise AssertionError("the adapter took a thread of the loop's pool")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)

    async def blocks() -> list[NodeWithScore]:
        return reranker.postprocess_nodes(many, query_str=QUESTION)

    for call, gate in (
        (reranker.apostprocess_nodes(many, query_str=QUESTION), LoopGate()),
        (blocks(), LoopGate(seconds=0.2)),
    ):
        with batches_through(gate, reranker._engine()), monkeypatch.context() as patch:
            patch.setattr(comparison, "maxsim", gate.hold(comparison.maxsim))
            assert len(await gate.run(call)) == count
        assert {"run", "start"} & set(gate.calls)
        assert ("maxsim" in gate.calls) is (model == "minilm")
        assert gate.blocked is (call.__name__ == "blocks")  # the gate detects a blocked loop
