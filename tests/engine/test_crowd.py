"""Many callers of single texts: the texts are tokenized together, and each caller gets its own result."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.tiny import SENTENCES, Layout, write_checkpoint

from millpond import Engine, PoolingParams
from millpond.errors import InputTooLongError

TEXTS = [f"{first} {second}" for first in SENTENCES[:8] for second in SENTENCES[:8]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("crowd") / "model", sentence_transformers=Layout())
    with Engine(folder, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture
def held(engine, monkeypatch):
    """The engine's forwards wait until the event is set, so that callers come together."""
    go = threading.Event()
    for runner in engine._replicas.runners:
        forward = runner.states
        monkeypatch.setattr(runner, "states", lambda batch, forward=forward: go.wait(60) and forward(batch))
    return go


@pytest.fixture
def together(engine, monkeypatch):
    """The number of calls tokenized at once, each time."""
    sizes = []
    intake = engine._dispatcher._intake
    whole = intake._tokenize_group
    monkeypatch.setattr(intake, "_tokenize_group", lambda calls: sizes.append(len(calls)) or whole(calls))
    return sizes


def crowd(engine, held, calls):
    """The results of ``calls``, each made in a thread of its own while the engine is held."""
    # Before these, more calls are running than there are slots.
    first = [engine.submit("embed", [text]) for text in SENTENCES[:9]]
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


def test_a_crowd_is_tokenized_together_and_gets_what_each_would_get_alone(engine, held, together):
    results = crowd(engine, held, [lambda text=text: engine.submit("embed", [text]) for text in TEXTS])
    assert max(together) >= 8  # 64 calls in at most nine groups: at most eight lanes took one each before the rest
    rows = np.concatenate([result.embeddings for result in results])
    alone = np.concatenate([engine.embed([text]).embeddings for text in TEXTS])
    np.testing.assert_allclose(rows, alone, atol=1e-5)
    assert np.abs(rows - np.roll(alone, 1, axis=0)).max() > 1e-2
    assert [result.usage.prompt_tokens for result in results] == [
        engine.embed([text]).usage.prompt_tokens for text in TEXTS
    ]


def test_calls_of_different_plans_keep_their_own(engine, held):
    def embed(text, prompt):
        return lambda: engine.submit("embed", [text], PoolingParams(prompt=prompt))

    results = crowd(engine, held, [embed(text, prompt) for text in TEXTS[:8] for prompt in ("", "query: ")])
    for i, text in enumerate(TEXTS[:8]):
        plain, prompted = (engine.embed([text], prompt=prompt).embeddings for prompt in ("", "query: "))
        np.testing.assert_allclose(results[2 * i].embeddings, plain, atol=1e-5)
        np.testing.assert_allclose(results[2 * i + 1].embeddings, prompted, atol=1e-5)
        assert np.abs(plain - prompted).max() > 1e-3


def test_one_text_that_is_too_long_fails_alone(engine, held, together):
    texts = [*TEXTS[:5], " ".join(SENTENCES * 3), *TEXTS[5:9]]
    results = crowd(
        engine,
        held,
        [lambda text=text: engine.submit("embed", [text], PoolingParams(truncate="error")) for text in texts],
    )
    assert max(together) > 1
    for i, (text, result) in enumerate(zip(texts, results, strict=True)):
        if i == 5:
            assert isinstance(result, InputTooLongError) and "index 0" in str(result)
        else:
            np.testing.assert_allclose(result.embeddings, engine.embed([text]).embeddings, atol=1e-5)


def test_a_cancelled_call_of_a_crowd_is_not_run(engine, held, together):
    gone = []

    def cancelled():
        future = engine.submit("embed", ["nobody waits for this one"])
        gone.append(future.cancel())
        return engine.submit("embed", [TEXTS[0]])

    (result,) = crowd(engine, held, [cancelled])
    assert gone == [True]
    np.testing.assert_allclose(result.embeddings, engine.embed([TEXTS[0]]).embeddings, atol=1e-5)
