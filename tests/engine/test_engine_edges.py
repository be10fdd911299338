"""Calls cancelled, interrupted or refused, engines closed in any thread, crowds of callers, and bounded memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import SENTENCES, Layout

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.errors import EngineClosedError, InputTooLongError, InvalidRequestError


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert")


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


CROWD = [f"{first} {second}" for first in SENTENCES[:8] for second in SENTENCES[:8]]


@pytest.fixture
def crowded(checkpoint_of, engine_of):
    return engine_of(checkpoint_of("bert", sentence_transformers=Layout()))


@pytest.fixture
def held(crowded, monkeypatch):
    """The engine's forwards wait until the event is set, so that callers come together."""
    go = threading.Event()
    for runner in crowded._replicas.runners:
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda requests, run=run: go.wait(60) and run(requests))
    return go


@pytest.fixture
def together(crowded, monkeypatch):
    """The number of calls tokenized at once, each time."""
    sizes = []
    intake = crowded._dispatcher._intake
    whole = intake._tokenize_group
    monkeypatch.setattr(intake, "_tokenize_group", lambda calls: sizes.append(len(calls)) or whole(calls))
    return sizes


def crowd(crowded, held, calls):
    """The results of ``calls``, each made in a thread of its own while the engine is held."""
    # Before these, more calls are running than there are slots.
    first = [crowded.submit("embed", [text]) for text in SENTENCES[:9]]
    arrived = threading.Semaphore(0)

    def run(call):
        future = call()
        arrived.release()
        return future.exception() or future.result()

    with ThreadPoolExecutor(len(calls)) as threads:
        waiting = [threads.submit(run, call) for call in calls]
        for _ in calls:
            assert arrived.acquire(timeout=60)
        held.set()
        results = [one.result() for one in waiting]
    for future in first:
        future.result()
    return results


def test_a_crowd_is_tokenized_together_and_gets_what_each_would_get_alone(crowded, held, together):
    results = crowd(crowded, held, [lambda text=text: crowded.submit("embed", [text]) for text in CROWD])
    assert max(together) >= 8  # 64 calls in at most nine groups: at most eight lanes took one each before the rest
    rows = np.concatenate([result.embeddings for result in results])
    alone = np.concatenate([crowded.embed([text]).embeddings for text in CROWD])
    np.testing.assert_allclose(rows, alone, atol=1e-5)
    assert np.abs(rows - np.roll(alone, 1, axis=0)).max() > 1e-2
    assert [result.usage.prompt_tokens for result in results] == [
        crowded.embed([text]).usage.prompt_tokens for text in CROWD
    ]


def test_calls_of_different_plans_keep_their_own(crowded, held):
    def embed(text, prompt):
        return lambda: crowded.submit("embed", [text], PoolingParams(prompt=prompt))

    results = crowd(crowded, held, [embed(text, prompt) for text in CROWD[:8] for prompt in ("", "query: ")])
    for i, text in enumerate(CROWD[:8]):
        plain, prompted = (crowded.embed([text], prompt=prompt).embeddings for prompt in ("", "query: "))
        np.testing.assert_allclose(results[2 * i].embeddings, plain, atol=1e-5)
        np.testing.assert_allclose(results[2 * i + 1].embeddings, prompted, atol=1e-5)
        assert np.abs(plain - prompted).max() > 1e-3


def test_one_text_that_is_too_long_fails_alone(crowded, held, together):
    texts = [*CROWD[:5], " ".join(SENTENCES * 3), *CROWD[5:9]]
    results = crowd(
        crowded,
        held,
        [lambda text=text: crowded.submit("embed", [text], PoolingParams(truncate="error")) for text in texts],
    )
    assert max(together) > 1
    for i, (text, result) in enumerate(zip(texts, results, strict=True)):
        if i == 5:
            assert isinstance(result, InputTooLongError) and "index 0" in str(result)
        else:
            np.testing.assert_allclose(result.embeddings, crowded.embed([text]).embeddings, atol=1e-5)


@pytest.fixture
def no_collector():
    """No garbage collection: it would hide a reference cycle around a call."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def short_texts(count, read=None):
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    for i in range(count):
        if read is not None:
            read.append(i)
        yield f"{words[i % len(words)]} {words[i // len(words) % len(words)]} {words[i // 7 % len(words)]}"


@pytest.mark.contract
def test_embed_iter_reads_a_bounded_stretch_ahead(crowded):
    read = deque(maxlen=1)
    ahead = [read[0] - i for i, _ in enumerate(crowded.embed_iter(short_texts(12_000, read)))]
    assert len(ahead) == 12_000
    assert max(ahead) < 4096


def growth(crowded, keep):
    """Growth of Python's and numpy's memory in bytes from 4,000 texts to 12,000."""
    kept, sizes = [], []
    tracemalloc.start()
    try:
        for i, row in enumerate(crowded.embed_iter(short_texts(16_384))):
            if keep:
                kept.append(row)
            if i in (4_000, 12_000):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return sizes[1] - sizes[0]


@pytest.mark.contract
def test_memory_does_not_grow_with_the_number_of_texts(crowded, no_collector):
    vectors = 8_000 * 48 * 4  # bytes
    assert growth(crowded, keep=False) < vectors / 2
    assert growth(crowded, keep=True) > vectors / 2  # as if the vectors were kept
