"""late_interaction.rerank: MaxSim over token states, whatever the score type of the checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import TEXTS, Layout, write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford

from millpond import AsyncEngine, Engine, RerankOutput
from millpond.errors import EngineClosedError, InputTooLongError, InvalidRequestError, UnsupportedTaskError
from millpond.late_interaction import arerank, maxsim, rerank
from millpond.params import PoolingParams

QUERY = "How deep is the mill pond?"
DOCUMENTS = list(TEXTS)

Rerank = Callable[..., RerankOutput]


def awaited(engine: Engine, *args, **options) -> RerankOutput:
    """``arerank`` over an engine."""
    return asyncio.run(arerank(engine, *args, **options))


def awaited_of_async(engine: Engine, *args, **options) -> RerankOutput:
    """``arerank`` over an AsyncEngine."""
    return asyncio.run(arerank(AsyncEngine(engine), *args, **options))


@pytest.fixture(params=[rerank, awaited, awaited_of_async], ids=["sync", "async", "AsyncEngine"])
def call(request: pytest.FixtureRequest) -> Rerank:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("late-rerank")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """An embedder, with a prompt for each role."""
    layout = Layout(prompts={"query": "find: ", "document": "keep: "})
    with Engine(
        write_checkpoint(folder / "bert", "bert", sentence_transformers=layout), dtype="float32", device="cpu"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def colbert(folder: Path) -> Iterator[Engine]:
    with Engine(write_stanford(folder / "colbert"), dtype="float32", device="cpu") as engine:
        yield engine


def expected(engine: Engine, query: str, documents: list[str]) -> np.ndarray:
    """The definition: matrices of either role, rows of length 1, the sum of the best."""
    query_matrix = engine.token_embed([query], role="query", normalize=True).embeddings
    document_matrices = engine.token_embed(documents, role="document", normalize=True).embeddings
    return maxsim(query_matrix, document_matrices)[0]


def test_an_embedder_ranks_by_its_token_states(engine: Engine, call: Rerank):
    scores = expected(engine, QUERY, DOCUMENTS)
    output = call(engine, QUERY, DOCUMENTS)
    assert [result.index for result in output] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([result.relevance_score for result in output], np.sort(scores)[::-1], atol=1e-4)
    assert [result.document for result in output] == [DOCUMENTS[result.index] for result in output]
    # Negative controls: the engine's own score is the cosine of two vectors; roles and unit length change the score.
    assert np.abs(engine.score(QUERY, DOCUMENTS).scores).max() <= 1.0001 < output[0].relevance_score
    raw = engine.token_embed([QUERY, *DOCUMENTS], normalize=False).embeddings
    assert np.abs(np.linalg.norm(raw.flat, axis=1) - 1).max() > 0.1
    swapped = maxsim(
        engine.token_embed([QUERY], role="document", normalize=True).embeddings,
        engine.token_embed(DOCUMENTS, role="query", normalize=True).embeddings,
    )[0]
    assert np.abs(swapped - scores).max() > 1e-2


def test_the_best_are_kept_and_duplicates_are_scored_alike(engine: Engine, call: Rerank):
    whole = call(engine, QUERY, DOCUMENTS)
    best = call(engine, QUERY, DOCUMENTS, top_n=3)
    assert [result.index for result in best] == [result.index for result in whole[:3]]
    assert len(call(engine, QUERY, DOCUMENTS, top_n=99)) == len(DOCUMENTS)
    twice = [result for result in whole if result.document == DOCUMENTS[1]]
    assert [result.index for result in twice] == [1, 6]
    assert twice[0].relevance_score == twice[1].relevance_score


def test_a_late_interaction_checkpoint_scores_as_it_does(colbert: Engine, call: Rerank):
    own = colbert.rerank(QUERY, DOCUMENTS)
    again = call(colbert, QUERY, DOCUMENTS)
    assert [result.index for result in again] == [result.index for result in own]
    # Two calls may be batched differently, which changes the last bits.
    scores = [[result.relevance_score for result in output] for output in (again, own)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
    np.testing.assert_allclose(
        [result.relevance_score for result in own], np.sort(expected(colbert, QUERY, DOCUMENTS))[::-1], atol=1e-4
    )


def test_tokens_and_truncation_are_reported(engine: Engine, call: Rerank):
    long = "mill pond " * 200
    output = call(engine, QUERY, ["wheel", long])
    assert output.truncated.tolist() == [False, True]
    sides = [engine.token_embed([QUERY], role="query"), engine.token_embed(["wheel", long], role="document")]
    assert output.usage.prompt_tokens == sum(side.usage.prompt_tokens for side in sides)
    with pytest.raises(InputTooLongError):
        call(engine, QUERY, ["wheel", long], truncate="error")
    front, back = call(engine, QUERY, [long + "tail"]), call(engine, QUERY, [long + "tail"], truncate="start")
    assert front[0].relevance_score != back[0].relevance_score


def test_no_documents_give_no_results(engine: Engine, colbert: Engine, call: Rerank):
    for each in (engine, colbert):
        assert list(call(each, QUERY, [])) == []


@pytest.mark.parametrize(
    ("query", "documents", "options", "error", "message"),
    [
        (["a"], ["b"], {}, TypeError, "one query, a str, not a list"),
        ("a", "b", {}, TypeError, "a list of documents, not a str"),
        ("a", ["b"], {"top_n": 0}, InvalidRequestError, "top_n=0 must be"),
        ("a", ["b"], {"top_n": True}, InvalidRequestError, "top_n=True must be"),
        ("a", ["b", None], {}, InvalidRequestError, "index 1"),
        ("a", ["b", "c", "b", "\ud800"], {}, InvalidRequestError, "the document at index 3 holds a lone surrogate"),
        ("\ud800", ["b"], {}, InvalidRequestError, "the query at index 0 holds a lone surrogate"),
    ],
)
def test_an_invalid_call_is_refused(engine: Engine, call: Rerank, query, documents, options, error, message):
    with pytest.raises(error, match=message):
        call(engine, query, documents, **options)


def test_a_checkpoint_without_token_states_is_refused(folder: Path, call: Rerank):
    with Engine(write_cross_encoder(folder / "cross"), dtype="float32", device="cpu") as cross:
        assert len(cross.rerank(QUERY, DOCUMENTS)) == len(DOCUMENTS)
        with pytest.raises(UnsupportedTaskError, match="not token_embed"):
            call(cross, QUERY, DOCUMENTS)


def test_a_closed_engine_raises(folder: Path, call: Rerank):
    engine = Engine(write_checkpoint(folder / f"closed-{call.__name__}", "bert"), dtype="float32", device="cpu")
    engine.close()
    with pytest.raises(EngineClosedError):
        call(engine, QUERY, DOCUMENTS)


def test_pairs_with_several_queries(engine: Engine):
    pairs = [("How deep?", DOCUMENTS[1]), (QUERY, DOCUMENTS[2]), ("How deep?", DOCUMENTS[3])]
    scores = engine.submit_score(pairs, PoolingParams(), maxsim=True).result().scores
    alone = [expected(engine, query, [document])[0] for query, document in pairs]
    np.testing.assert_allclose(scores, alone, atol=1e-4)


def test_the_module_does_not_hide_the_function():
    import importlib

    import millpond.late_interaction

    module = importlib.import_module("millpond.late_interaction.reranking")
    assert millpond.late_interaction.rerank is module.rerank is rerank
