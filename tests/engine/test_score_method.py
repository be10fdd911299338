"""method= of score and rerank: cosine or MaxSim, for any checkpoint that has the vectors; and scores of few pairs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, TEXTS, Layout, write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_pylate

from millpond import AsyncEngine, Engine, PoolingParams, RerankOutput
from millpond.errors import InputTooLongError, InvalidRequestError, UnsupportedTaskError

QUERY = "How deep is the mill pond?"


DOCUMENTS = list(TEXTS)


Call = Callable[..., Any]


def blocking(engine: Engine, name: str, *args: Any, **options: Any) -> Any:
    return getattr(engine, name)(*args, **options)


def awaited(engine: Engine, name: str, *args: Any, **options: Any) -> Any:
    return asyncio.run(getattr(AsyncEngine(engine), name)(*args, **options))


@pytest.fixture(params=[blocking, awaited], ids=["Engine", "AsyncEngine"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.fixture
def embedder(checkpoint_of: Callable[..., Path], engine_of: Callable[..., Engine]) -> Engine:
    layout = Layout(prompts={"query": "find: ", "document": "keep: "})
    return engine_of(checkpoint_of("bert", sentence_transformers=layout))


@pytest.fixture
def cross(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of(write_cross_encoder)


def assert_same(ranked: RerankOutput, expected: RerankOutput) -> None:
    """The same order and scores; two calls may be batched differently, which changes the last bits."""
    assert [result.index for result in ranked] == [result.index for result in expected]
    scores = [[result.relevance_score for result in output] for output in (ranked, expected)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6)


def cosine(engine: Engine) -> np.ndarray:
    """The definition: unit vectors of either role."""
    query = engine.embed([QUERY], role="query", normalize=False).embeddings[0]
    documents = engine.embed(DOCUMENTS, role="document", normalize=False).embeddings
    return documents @ query / np.linalg.norm(documents, axis=1) / np.linalg.norm(query)


def maxsim(engine: Engine) -> np.ndarray:
    """The definition: unit rows of either role, the sum of the best products."""
    query = engine.token_embed([QUERY], role="query", normalize=True).embeddings[0]
    documents = engine.token_embed(DOCUMENTS, role="document", normalize=True).embeddings
    return np.array([(query @ matrix.T).max(axis=1).sum() for matrix in documents])


@pytest.mark.parametrize(
    ("kind", "method", "scored", "ranked"),
    [
        ("embedder", "auto", "cosine", "maxsim"),
        ("embedder", "cosine", "cosine", "cosine"),
        ("embedder", "maxsim", "maxsim", "maxsim"),
        ("cross", "auto", "cross-encoder", "cross-encoder"),
    ],
)
def test_an_output_says_what_its_scores_are(
    request: pytest.FixtureRequest, call: Call, kind: str, method: str, scored: str, ranked: str
) -> None:
    """On the scale of a cosine 5.47 would be nonsense."""
    engine = request.getfixturevalue(kind)
    assert call(engine, "score", QUERY, DOCUMENTS, method=method).method == scored
    assert call(engine, "rerank", QUERY, DOCUMENTS, method=method).method == ranked


def test_cosine_and_maxsim_of_an_embedder(embedder: Engine, call: Call) -> None:
    scores = {
        method: call(embedder, "score", QUERY, DOCUMENTS, method=method).scores for method in ("cosine", "maxsim")
    }
    np.testing.assert_allclose(scores["cosine"], cosine(embedder), atol=1e-5)
    np.testing.assert_allclose(scores["maxsim"], maxsim(embedder), atol=1e-4)
    assert np.abs(scores["maxsim"] - scores["cosine"]).min() > 0.1  # two measures, told apart on every document
    np.testing.assert_allclose(call(embedder, "score", QUERY, DOCUMENTS).scores, scores["cosine"], atol=1e-6)
    for method, expected in scores.items():
        ranked = call(embedder, "rerank", QUERY, DOCUMENTS, method=method)
        assert [result.index for result in ranked] == np.argsort(-expected, kind="stable").tolist()
        np.testing.assert_allclose([result.relevance_score for result in ranked], np.sort(expected)[::-1], rtol=1e-5)


def test_an_embedder_scores_by_cosine_and_reranks_by_maxsim(embedder: Engine, call: Call) -> None:
    assert (embedder.spec.score_type, embedder.spec.rerank_type) == ("bi-encoder", "late-interaction")
    scores = call(embedder, "score", QUERY, DOCUMENTS).scores
    np.testing.assert_allclose(scores, cosine(embedder), atol=1e-5)
    ranked = call(embedder, "rerank", QUERY, DOCUMENTS)
    assert_same(ranked, call(embedder, "rerank", QUERY, DOCUMENTS, method="maxsim"))
    pairs = [(QUERY, document) for document in DOCUMENTS]
    ranking = embedder.submit("score", pairs, PoolingParams(), ranking=True).result().scores
    np.testing.assert_allclose(ranking, maxsim(embedder), atol=1e-4)


@pytest.mark.parametrize("mean", [False, True])
def test_a_late_interaction_checkpoint_keeps_its_own_maxsim(tmp_path: Path, call: Call, mean: bool) -> None:
    path = write_pylate(tmp_path / "model", similarity_fn_name="MeanMaxSim" if mean else "MaxSim")
    with Engine(path, dtype="float32", device="cpu") as engine:
        auto = call(engine, "score", QUERY, DOCUMENTS)
        named = call(engine, "score", QUERY, DOCUMENTS, method="maxsim")
        np.testing.assert_allclose(named.scores, auto.scores, rtol=1e-5)
        query_tokens = len(engine.token_embed([QUERY], role="query").embeddings[0])
        np.testing.assert_allclose(named.scores * (query_tokens if mean else 1), maxsim(engine), rtol=1e-5)


@pytest.mark.parametrize(("method", "task"), [("cosine", "embed"), ("maxsim", "token_embed")])
def test_a_cross_encoder_has_neither(cross: Engine, call: Call, method: str, task: str) -> None:
    own = call(cross, "score", QUERY, DOCUMENTS).scores
    np.testing.assert_allclose(call(cross, "score", QUERY, DOCUMENTS, method="auto").scores, own, rtol=1e-5)
    for name in ("score", "rerank"):
        with pytest.raises(
            UnsupportedTaskError, match=rf"method='{method}' .*not {task}; choose method='auto', .*convert=\"embed\""
        ):
            call(cross, name, QUERY, DOCUMENTS, method=method)


def test_a_checkpoint_that_scores_nothing_is_not_told_to_choose_auto(tmp_path: Path, call: Call) -> None:
    path = write_checkpoint(tmp_path / "model", "modernbert", head="SequenceClassification", labels=3)
    with Engine(path, dtype="float32", device="cpu") as engine:
        with pytest.raises(UnsupportedTaskError, match="not score"):
            call(engine, "score", QUERY, DOCUMENTS)
        with pytest.raises(UnsupportedTaskError, match="not embed; load another model"):
            call(engine, "score", QUERY, DOCUMENTS, method="cosine")


@pytest.mark.parametrize("method", ["dot", None, "MAXSIM"])
def test_an_unknown_method_is_named_with_those_there_are(embedder: Engine, call: Call, method: Any) -> None:
    for name in ("score", "rerank"):
        with pytest.raises(
            InvalidRequestError, match=rf"method={method!r} is unknown; choose one of auto, cosine, maxsim"
        ):
            call(embedder, name, QUERY, DOCUMENTS, method=method)


@pytest.mark.parametrize("method", ["cosine", "maxsim"])
def test_options_and_errors_are_those_of_any_score(embedder: Engine, call: Call, method: str) -> None:
    long = "mill pond " * 200
    assert call(embedder, "score", QUERY, ["wheel", long], method=method).truncated.tolist() == [False, True]
    with pytest.raises(InputTooLongError):
        call(embedder, "rerank", QUERY, ["wheel", long], method=method, truncate="error")
    for option in ({"instruction": "x"}, {"activation": True}):
        with pytest.raises(InvalidRequestError, match=r"^\w+='?\w+'? means nothing to a score of two vectors"):
            call(embedder, "score", QUERY, DOCUMENTS, method=method, **option)
    with pytest.raises(InvalidRequestError, match="the document at index 1 holds a lone surrogate"):
        call(embedder, "score", QUERY, ["a", "\ud800"], method=method)
    assert len(call(embedder, "rerank", QUERY, [], method=method)) == 0


def test_a_submitted_score_takes_the_method(embedder: Engine, cross: Engine) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    params = PoolingParams()
    scores = {
        method: embedder.submit("score", pairs, params, method=method).result().scores
        for method in ("auto", "cosine", "maxsim")
    }
    np.testing.assert_allclose(scores["auto"], scores["cosine"], atol=1e-6)
    np.testing.assert_allclose(scores["maxsim"], maxsim(embedder), atol=1e-4)
    assert np.abs(scores["maxsim"] - scores["cosine"]).max() > 0.1
    with pytest.raises(InvalidRequestError, match="method='maxsim' reads no template; pass one of them only"):
        embedder.submit("score", pairs, params, method="maxsim", template="{{ query }}")
    with pytest.raises(UnsupportedTaskError, match="method='maxsim'"):
        cross.submit("score", pairs, params, method="maxsim")
    with pytest.raises(InvalidRequestError, match="template means nothing to embed"):
        cross.submit("embed", ["a"], template="{{ query }}")


@pytest.mark.parametrize("method", ["auto", "cosine", "maxsim"])
def test_params_of_another_task_are_refused(embedder: Engine, method: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"params\.task='embed' contradicts the task 'score'"):
        embedder.submit("score", [("a", "b")], PoolingParams(task="embed"), method=method)
    assert embedder.submit("score", [("a", "b")], PoolingParams(task="score"), method=method).result(timeout=30)


HERE = threading.current_thread


@pytest.fixture
def engine(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    monkeypatch.setattr("millpond.backends.native.threads.default_threads", lambda: 2)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        while engine._dispatcher._scheduler._idle < len(engine._dispatcher.workers):  # a worker first looks for work
            threading.Event().wait(0.001)
        yield engine


@pytest.fixture
def batches(engine, monkeypatch):
    """Of each batch its thread and its number of texts."""
    seen = []
    run = engine._replicas.runner.run
    monkeypatch.setattr(engine._replicas.runner, "run", lambda batch: seen.append((HERE(), len(batch))) or run(batch))
    return seen


@pytest.mark.parametrize("method", ["cosine", "maxsim"])
def test_a_small_score_is_one_batch_in_the_callers_thread(engine, batches, method, monkeypatch):
    if len(engine._dispatcher.workers) < 2:
        pytest.skip("on one core two calls at once are left to the worker")
    handed_over = []
    monkeypatch.setattr(engine._dispatcher.threads, "submit", lambda *work: handed_over.append(work))
    scores = engine.score(SENTENCES[0], list(SENTENCES[1:4]), method=method).scores
    assert batches == [(threading.current_thread(), 4)] and not handed_over
    assert scores.shape == (3,) and np.isfinite(scores).all()


def test_a_large_score_is_left_to_the_threads(engine, batches):
    documents = [f"{SENTENCES[0]} {i}" for i in range(16 + 1)]
    assert len(engine.score(SENTENCES[1], documents).scores) == len(documents)
    assert batches and all(thread is not threading.current_thread() for thread, _ in batches)
