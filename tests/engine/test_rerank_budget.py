"""rerank(budget_ms=): what is scored, in what order the rest follows, and that nothing is left in the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, TEXTS
from tests.tiny.heads import write_cross_encoder, write_pylate

from millpond import AsyncEngine, Engine
from millpond.engine.composite.time_model import TimeModel
from millpond.errors import InputTooLongError, InvalidRequestError, MillpondError, UnsupportedTaskError

QUERY = "How deep is the mill pond?"
DOCUMENTS = [f"{text} {number}" for number, text in enumerate(SENTENCES * 4)][:40]
HOUR = 3_600_000.0

Call = Callable[..., Any]


def blocking(engine: Engine, *args: Any, **options: Any) -> Any:
    return engine.rerank(*args, **options)


def awaited(engine: Engine, *args: Any, **options: Any) -> Any:
    return asyncio.run(AsyncEngine(engine).rerank(*args, **options))


@pytest.fixture(params=[blocking, awaited], ids=["Engine", "AsyncEngine"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


@pytest.mark.parametrize(
    ("writer", "method"),
    [(write_cross_encoder, "auto"), (write_pylate, "auto"), ("bert", "auto"), ("bert", "cosine")],
    ids=["cross-encoder", "colbert", "embedder", "cosine"],
)
def test_with_time_for_all_it_is_the_ranking_without_a_budget(
    engine_of: Callable[..., Engine], call: Call, writer: Any, method: str
) -> None:
    engine = engine_of(writer)
    plain = engine.rerank(QUERY, DOCUMENTS, method=method)
    timed = call(engine, QUERY, DOCUMENTS, method=method, budget_ms=HOUR)
    assert timed.stopped == "all" and timed.scored.all() and timed.method == plain.method
    assert 0 < timed.elapsed_ms < HOUR and plain.elapsed_ms is None and plain.scored.all() and plain.stopped == "all"
    scores = [{each.index: each.relevance_score for each in output} for output in (timed, plain)]
    np.testing.assert_allclose(
        [scores[0][i] for i in range(40)], [scores[1][i] for i in range(40)], rtol=1e-4, atol=1e-5
    )
    ordered = [each.relevance_score for each in timed]
    assert ordered == sorted(ordered, reverse=True) and all(each.scored for each in timed)
    wrong = engine.rerank(QUERY[::-1], DOCUMENTS, method=method)  # a negative control: other scores
    assert not np.allclose(
        [each.relevance_score for each in wrong], [each.relevance_score for each in plain], rtol=1e-4
    )


def test_a_budget_too_small_for_a_pair_is_the_order_of_the_first_stage(engine_of: Callable[..., Engine], call: Call):
    engine = engine_of(write_cross_encoder)
    first = [float(i * 7 % 11) for i in range(11)]
    output = call(engine, QUERY, DOCUMENTS[:11], budget_ms=1e-9, first_scores=first, top_n=5)
    assert (
        output.stopped == "time" and not output.scored.any() and output.scored.shape == output.truncated.shape == (11,)
    )
    assert [first[each.index] for each in output] == [10, 9, 8, 7, 6]
    assert [each.document for each in output] == [DOCUMENTS[each.index] for each in output]
    assert (
        all(np.isnan(each.relevance_score) and not each.scored for each in output) and output.method == "cross-encoder"
    )


def test_no_documents_are_all_scored(engine_of: Callable[..., Engine], call: Call):
    output = call(engine_of(write_cross_encoder), QUERY, [], budget_ms=5)
    assert len(output) == 0 and output.stopped == "all" and output.scored.shape == (0,)


def test_what_was_not_begun_in_time_never_runs(
    checkpoint_of: Callable[..., Path], call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(TimeModel, "took", lambda *_, **__: None)  # each call begins a part, as if it had time
    with Engine(checkpoint_of(write_cross_encoder), device="cpu", dtype="float32") as engine:
        gate, ran = threading.Event(), []

        def hold(batch: Any) -> None:
            ran.append(batch.texts)
            gate.wait()

        engine.observe(hold)
        held = []
        for text in TEXTS[: len(engine._dispatcher.workers)]:
            held.append(engine.submit("score", [(QUERY, text)]))
            while len(ran) < len(held):  # one worker less is left
                threading.Event().wait(0.001)
        try:
            output = call(engine, QUERY, DOCUMENTS, budget_ms=30)
            assert output.stopped == "time" and not output.scored.any()
            assert [each.index for each in output] == list(range(40))
            assert engine.stats().waiting_texts == len(held)
        finally:
            gate.set()
        assert [future.result().scores.shape for future in held] == [(1,)] * len(held)
        assert engine.score(QUERY, "the wheel").scores.shape == (1,)
        assert sum(ran) == len(held) + 1
        assert call(engine, QUERY, DOCUMENTS, budget_ms=HOUR).scored.all()  # the turn was given back


def test_errors_come_before_anything_is_queued(engine_of: Callable[..., Engine], call: Call):
    cross, embedder = engine_of(write_cross_encoder), engine_of("bert")
    for wrong in (0, float("nan"), "fast"):
        with pytest.raises(InvalidRequestError, match="^budget_ms="):
            call(cross, QUERY, DOCUMENTS, budget_ms=wrong)
    with pytest.raises(InvalidRequestError, match="^first_scores decides which documents are scored within budget_ms"):
        call(cross, QUERY, DOCUMENTS, first_scores=[1.0] * 40)
    with pytest.raises(InvalidRequestError, match="the document at index 1 is a int"):
        call(cross, QUERY, ["a", 5], budget_ms=1e-9)
    with pytest.raises(InvalidRequestError, match="means nothing"):
        call(embedder, QUERY, DOCUMENTS, budget_ms=1e-9, activation="sigmoid")
    with pytest.raises(UnsupportedTaskError, match="method='cosine'"):
        call(cross, QUERY, DOCUMENTS, budget_ms=1e-9, method="cosine")
    long = " ".join(SENTENCES * 30)
    with pytest.raises(InputTooLongError, match=r"at index 2 has") as error:
        call(cross, QUERY, ["a", "b", long], budget_ms=HOUR, first_scores=[0, 0, 1], truncate="error")
    assert error.value.index == 2


def test_a_callback_does_not_wait_for_its_own_thread(engine_of: Callable[..., Engine]):
    engine, errors, done = engine_of(write_cross_encoder), [], threading.Event()

    def ask(_: Any) -> None:
        try:
            engine.rerank(QUERY, DOCUMENTS, budget_ms=HOUR)
        except MillpondError as error:
            errors.append(str(error))
        done.set()

    while not errors:  # a future that is done already calls back in this thread
        done.clear()
        engine.submit("score", [(QUERY, text) for text in DOCUMENTS]).add_done_callback(ask)
        done.wait()
    assert "call it in a thread of yours" in errors[0]


def test_a_warning_names_documents_by_their_own_indices(
    checkpoint_of: Callable[..., Path], caplog: pytest.LogCaptureFixture
):
    with Engine(checkpoint_of(write_cross_encoder), device="cpu", dtype="float32") as engine:
        documents = ["a", "b", " ".join(SENTENCES * 30), "c"]
        output = engine.rerank(QUERY, documents, budget_ms=HOUR, first_scores=[1, 2, 4, 3])
    assert output.truncated.tolist() == [False, False, True, False]
    assert "index 2" in caplog.text and "index 0" not in caplog.text


def test_callers_take_turns(engine_of: Callable[..., Engine]):
    engine, outputs = engine_of(write_cross_encoder), []
    barrier = threading.Barrier(6)

    def ask() -> None:
        barrier.wait()
        outputs.append(engine.rerank(QUERY, DOCUMENTS, budget_ms=HOUR, top_n=40))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    orders = [[each.index for each in output] for output in outputs]
    assert len(outputs) == 6 and all(output.stopped == "all" and output.scored.all() for output in outputs)
    assert all(sorted(order) == list(range(40)) for order in orders)


def test_an_awaiting_task_that_is_cancelled_gives_its_turn_back(engine_of: Callable[..., Engine]):
    engine = engine_of(write_cross_encoder)

    async def ask() -> Any:
        many = asyncio.create_task(AsyncEngine(engine).rerank(QUERY, DOCUMENTS * 50, budget_ms=HOUR))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        many.cancel()
        with pytest.raises(asyncio.CancelledError):
            await many
        return await AsyncEngine(engine).rerank(QUERY, DOCUMENTS, budget_ms=HOUR)

    assert asyncio.run(ask()).scored.all()
