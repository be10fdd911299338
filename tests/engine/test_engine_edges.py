"""Calls cancelled, interrupted or refused, engines closed in any thread: no caller waits for ever, nothing leaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import as_completed, wait
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import write_checkpoint

from millpond import AsyncEngine, Engine
from millpond.errors import EngineClosedError, InvalidRequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("edges") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, dtype="float32", device="cpu") as engine:
        yield engine


def hold(engine: Engine) -> threading.Event:
    """Let no batch run until the returned event is set."""
    gate, run = threading.Event(), engine._replicas.runner.run

    def gated(requests):
        gate.wait(timeout=60)
        return run(requests)

    engine._replicas.runner.run = gated
    return gate


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_cancelled_future_wakes_whoever_waits_for_several(engine, task):
    gate = hold(engine)
    inputs = ["a", "b"] if task == "embed" else [("a", "b"), ("c", "d")]
    future = engine.submit(task, inputs)
    assert future.cancel()
    done, _ = wait([future], timeout=10)
    assert done == {future}
    assert list(as_completed([future], timeout=10)) == [future]
    gate.set()


def test_an_interrupted_call_is_not_waited_for(engine, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._loaded.encoder), "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.embed(["a"])
    assert not engine._dispatcher._admission.calls()
    assert engine.embed(["a"]).embeddings.shape == (1, 48)


def test_a_call_cancelled_while_it_is_tokenized_leaves_nothing_behind(engine):
    gate = hold(engine)
    for _ in range(20):
        engine.submit("embed", [f"text {i}" for i in range(3000)]).cancel()
    gate.set()
    engine.embed(["a"])
    # An intake thread may still tokenize a stretch of a cancelled call: wait until all of them have met.
    threads = engine._dispatcher.threads
    met = threading.Barrier(threads._max_workers, timeout=60)
    wait([threads.submit(met.wait) for _ in range(met.parties)], timeout=60)
    assert not met.broken
    assert not engine._dispatcher._admission.calls()
    assert not engine._dispatcher._intake._backlogs


def test_a_stream_longer_than_the_queue_waits_for_itself(folder):
    texts = [f"text {i % 7}" for i in range(5000)]
    with Engine(folder, dtype="float32", device="cpu", max_queue=1500) as engine:
        rows = list(engine.embed_iter(texts))
        expected = engine.embed(texts[:7]).embeddings
    assert len(rows) == len(texts)
    np.testing.assert_allclose(np.stack(rows[-7:]), expected[[i % 7 for i in range(4993, 5000)]], atol=1e-6)


def test_a_stream_hands_out_what_came_before_a_bad_text_and_names_its_index(engine):
    texts = [f"text {i % 9}" for i in range(1500)] + ["\ud800"]
    stream = engine.embed_iter(texts)
    assert len([next(stream) for _ in range(1024)]) == 1024
    with pytest.raises(InvalidRequestError, match="index 1500"):
        next(stream)


def test_closing_in_a_callback_lets_the_others_finish(folder):
    engine = Engine(folder, dtype="float32", device="cpu")
    gate = hold(engine)
    first = engine.submit("embed", ["a"])
    first.add_done_callback(lambda _: engine.close())
    second = engine.submit("embed", ["b", "c"])
    gate.set()
    assert second.result(timeout=30).embeddings.shape == (2, 48)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.embed(["d"])


def test_a_call_that_breaks_the_worker_s_loop_breaks_alone(engine, monkeypatch):
    broken = engine.submit("embed", ["a"])
    broken.result(timeout=30)

    def refuse(call, left):
        raise RuntimeError("no threads left")

    with monkeypatch.context() as patch:
        patch.setattr(engine._dispatcher._intake, "refill", refuse)
        future = engine.submit("embed", [f"text {i}" for i in range(5)])
        with pytest.raises(RuntimeError, match="no threads left"):
            future.result(timeout=30)
    assert engine.embed(["b"]).embeddings.shape == (1, 48)


def test_an_asynchronous_stream_names_a_bad_text_s_index_in_the_whole(engine):
    async def texts():
        for i in range(1500):
            yield f"text {i % 5}"
        yield "\ud800"

    async def run() -> int:
        count = 0
        with pytest.raises(InvalidRequestError, match="index 1500"):  # noqa: PT012
            async for _ in AsyncEngine(engine).embed_iter(texts()):
                count += 1
        return count

    assert asyncio.run(run()) > 0


def test_an_asynchronous_stream_and_context(folder):
    async def texts():
        for i in range(600):
            yield f"text {i % 5}"

    async def run() -> None:
        async with AsyncEngine(Engine(folder, dtype="float32", device="cpu")) as engine:
            rows = [row async for row in engine.embed_iter(texts())]
            same = [row async for row in engine.embed_iter([f"text {i}" for i in range(5)])]
        assert len(rows) == 600
        np.testing.assert_allclose(np.stack(rows[-5:]), np.stack(same), atol=1e-6)
        assert engine.engine.closed

    asyncio.run(run())
