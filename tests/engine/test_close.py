"""Closing an engine that has work: what is queued is finished or dropped, everyone who waits hears, no row is lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pytest
from tests.gates import until

from millpond import AsyncEngine, Engine, EngineClosedError, InvalidRequestError, VectorCache

TEXTS = [f"text {i} about the mill and the pond" for i in range(600)]


class Gate:
    """Lets an engine run a number of batches, then holds the next one until it is opened."""

    def __init__(self, engine: Engine, batches: int) -> None:
        self.ran = 0
        self.held = threading.Event()
        self._left = batches
        self._open = threading.Event()
        (self._runner,) = engine._replicas.runners
        self._run = self._runner.run
        self._runner.run = self.run  # type: ignore[method-assign]
        # Lanes would run several batches side by side.
        for worker in engine._dispatcher.workers:
            worker._runner = self._runner

    def run(self, requests: Any) -> Any:
        if self._left <= 0:
            self.held.set()
            assert self._open.wait(60)
        self._left -= 1
        self.ran += 1
        return self._run(requests)

    def open(self) -> None:
        self._left = 1 << 30
        self._open.set()


Make = Callable[..., tuple[Engine, Gate]]


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert")


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[tuple[Engine, Gate]] = []

    def engine(batches: int = 0, **options: Any) -> tuple[Engine, Gate]:
        loaded = Engine(folder, dtype="float32", device="cpu", max_batch_tokens=256, **options)
        made.append((loaded, Gate(loaded, batches)))
        return made[-1]

    yield engine
    for loaded, gate in made:
        gate.open()
        loaded.close(cancel=True)


def closing(engine: Engine, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=engine.close, kwargs=options)
    thread.start()
    until(lambda: engine.closed)
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_close_finishes_what_is_queued(make: Make) -> None:
    engine, gate = make()
    future = engine.submit("embed", TEXTS)
    thread = closing(engine)
    gate.open()
    assert ended(thread)
    assert len(future.result(0).embeddings) == len(TEXTS)
    assert engine.stats().calls_cancelled == 0


def test_cancel_drops_the_queue_and_finishes_the_batch_that_runs(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine, gate = make(batches=2)
    futures = [engine.submit("embed", TEXTS[i : i + 100]) for i in range(0, 600, 100)]
    assert gate.held.wait(30)
    before = gate.ran
    with caplog.at_level(logging.WARNING, "millpond"):
        thread = closing(engine, cancel=True)
        for future in futures:
            with pytest.raises(EngineClosedError, match="closed before this call was finished"):
                future.result(30)
    assert "drops 6 unfinished calls with 600 texts" in caplog.text
    assert thread.is_alive(), "the batch that runs cannot be stopped"
    gate.open()
    assert ended(thread)
    assert gate.ran - before <= len(engine._dispatcher.workers), "batches were run for calls that nobody waits for"
    stats = engine.stats()
    assert (stats.calls_cancelled, stats.calls_failed, stats.running_calls, stats.waiting_texts) == (6, 0, 0, 0)
    with pytest.raises(EngineClosedError):
        engine.embed(["a"])


def _waiting(work: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work)


@pytest.mark.parametrize(
    "work",
    [
        lambda engine: engine.embed(TEXTS),
        lambda engine: engine.embed(TEXTS[:1]),
        lambda engine: list(engine.embed_iter(TEXTS)),
        lambda engine: engine.rerank("a question", TEXTS, method="cosine"),
        lambda engine: engine.embed([" ".join(TEXTS)], long_texts="mean"),
        lambda engine: asyncio.run(AsyncEngine(engine).embed(TEXTS * 5)),
        lambda engine: asyncio.run(AsyncEngine(engine).rerank("a question", TEXTS, method="maxsim")),
        lambda engine: next(as_completed([engine.submit("embed", TEXTS)])).result(),
    ],
    ids=range(8),
)
def test_everyone_who_waits_gets_the_error(work: Callable[[Engine], Any], make: Make) -> None:
    engine, gate = make()
    waiting = [_waiting(lambda: work(engine)) for _ in range(3)]
    assert gate.held.wait(30)
    until(lambda: engine.stats().running_calls >= 3)
    thread = closing(engine, cancel=True)
    until(lambda: engine.stats().running_calls == 0)
    gate.open()
    for each in waiting:
        assert isinstance(each.exception(30), EngineClosedError)
    assert ended(thread)


def test_calls_that_begin_while_it_is_closed_are_answered_or_refused(folder: Path) -> None:
    """A race: no caller hangs, and none gets an error of the thread pool."""
    for _ in range(4):
        engine = Engine(folder, dtype="float32", device="cpu")
        results: list[object] = []

        def call(engine: Engine = engine, results: list[object] = results) -> None:
            while True:
                for texts in (TEXTS[:2], TEXTS[:40]):
                    try:
                        results.append(len(engine.embed(texts).embeddings))
                    except EngineClosedError as error:
                        return results.append(error)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda results=results: len(results) > 4)
        engine.close(cancel=True)
        assert all(ended(thread) for thread in threads)
        assert sum(isinstance(result, EngineClosedError) for result in results) == 4


def test_rows_that_were_computed_are_in_the_cache(make: Make, tmp_path: Path) -> None:
    engine, gate = make(batches=3, cache=tmp_path / "cache.db")
    future = engine.submit("embed", TEXTS)
    assert gate.held.wait(30)
    thread = closing(engine, cancel=True)
    assert isinstance(future.exception(30), EngineClosedError)
    gate.open()
    assert ended(thread)
    rows = engine.stats().batch_texts
    assert 0 < rows < len(TEXTS)
    with VectorCache(tmp_path / "cache.db") as cache:
        assert len(cache) == rows, "also those of the batch that ran while the engine was closed"


def test_rows_that_a_caller_computes_meanwhile_are_in_the_cache(make: Make, tmp_path: Path) -> None:
    """A small call is worked on in the thread that made it, which the engine does not end."""
    engine, gate = make(cache=tmp_path / "cache.db")
    waiting = _waiting(lambda: engine.embed(TEXTS[:3]))
    assert gate.held.wait(30)
    thread = closing(engine, cancel=True)
    until(lambda: engine.stats().running_calls == 0)
    gate.open()
    assert isinstance(waiting.exception(30), EngineClosedError)
    assert ended(thread)
    with VectorCache(tmp_path / "cache.db") as cache:
        assert len(cache) == 3


def test_after_the_timeout_the_rest_is_dropped(make: Make) -> None:
    engine, gate = make(batches=1)
    future = engine.submit("embed", TEXTS)
    assert gate.held.wait(30)
    thread = closing(engine, timeout=0.2)
    assert not future.done()
    assert isinstance(future.exception(30), EngineClosedError)
    gate.open()
    assert ended(thread)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True, [1]])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, make: Make) -> None:
    engine, gate = make()
    gate.open()
    with pytest.raises(InvalidRequestError, match="timeout=.*number of seconds"):
        engine.close(timeout=timeout)
    assert not engine.closed
    engine.embed(["a"])


def test_a_second_close_ends_the_first(make: Make) -> None:
    engine, gate = make()
    future = engine.submit("embed", TEXTS)
    assert gate.held.wait(30)
    draining = [closing(engine) for _ in range(3)]
    draining[0].join(0.05)
    assert all(thread.is_alive() for thread in draining)
    cancelling = closing(engine, cancel=True)
    assert isinstance(future.exception(30), EngineClosedError)
    gate.open()
    assert all(ended(thread) for thread in [*draining, cancelling])
    for options in ({}, {"cancel": True}, {"timeout": 0}):
        engine.close(**options)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_a_block_left_by_an_interrupt_drops_the_queue(error: type[BaseException], make: Make) -> None:
    engine, gate = make()

    def block() -> None:
        with engine:
            futures.append(engine.submit("embed", TEXTS))
            assert gate.held.wait(30)
            threading.Timer(0.1, gate.open).start()
            raise error

    futures: list[Future[Any]] = []
    with pytest.raises(error):
        block()
    assert isinstance(futures[0].exception(0), EngineClosedError)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def test_an_async_engine_is_closed_as_its_engine(make: Make) -> None:
    engine, gate = make()
    front = AsyncEngine(engine)
    calls = [asyncio.create_task(front.embed(TEXTS)) for _ in range(3)]
    # The loop's own threads are all taken by callers that wait for the engine.
    blocked = [asyncio.create_task(asyncio.to_thread(engine.embed, TEXTS)) for _ in range(40)]
    await _until(lambda: engine.stats().running_calls >= 8)
    slow = asyncio.create_task(front.aclose())
    await asyncio.sleep(0.05)
    assert engine.closed
    assert not slow.done()
    threading.Timer(0.2, gate.open).start()
    await asyncio.wait_for(front.aclose(cancel=True), 30)
    await asyncio.wait_for(slow, 30)
    results = await asyncio.gather(*calls, *blocked, return_exceptions=True)
    assert {type(result) for result in results} == {EngineClosedError}
    with pytest.raises(InvalidRequestError, match="timeout"):
        await front.aclose(timeout=-1)
