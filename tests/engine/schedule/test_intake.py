"""What is tokenized ahead of the batches: enough that none waits, of a call of any length only so much."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.recording import Recording
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine, PoolingParams
from millpond.engine import dispatcher, loading
from millpond.engine.execute.runner import Runner
from millpond.engine.input.encode import InputEncoder
from millpond.engine.schedule.request import Request
from millpond.errors import InputTooLongError
from tests import recording

WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})
BUDGET = 1024


def short_texts(count: int) -> list[str]:
    """Distinct texts of two to four words."""
    n = len(WORDS)
    texts = [f"{WORDS[i % n]} {WORDS[i // n % n]}" + f" {WORDS[i // n**2]}" * (i >= n**2) for i in range(count)]
    assert len(set(texts)) == count
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("intake") / "model", "bert")


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of threads that tokenize."""
    monkeypatch.setattr(dispatcher, "_intake_threads", lambda replicas: request.param)
    return request.param


@pytest.fixture(params=["cpu", pytest.param("streams", marks=pytest.mark.contract)])
def engine(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if request.param == "streams":
        recording.pretend_varlen(monkeypatch)
        monkeypatch.setattr(loading, "_backend", lambda device: Recording())
        monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=BUDGET) as engine:
        yield engine


class Tokenized:
    """Counts the texts that are tokenized; ``before`` is called first, with the texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[Sequence[Any]], object] = len) -> None:
        self.texts = 0
        self._lock = threading.Lock()
        encode = InputEncoder.encode

        def counted(encoder: InputEncoder, items: Sequence[Any], *args: Any, **options: Any) -> Any:
            before(items)
            tokenized = encode(encoder, items, *args, **options)
            with self._lock:
                self.texts += len(tokenized)
            return tokenized

        monkeypatch.setattr(InputEncoder, "encode", counted)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_a_long_call_keeps_only_a_bounded_number_tokenized(threads, engine, monkeypatch):
    tokenized, ahead = Tokenized(monkeypatch), []
    done = 0

    def ran(batch: Any) -> None:
        nonlocal done
        done += batch.texts
        ahead.append(tokenized.texts - done)

    engine.observe(ran)
    texts = short_texts(12_000)
    assert len(engine.embed(texts)) == len(texts) == tokenized.texts
    # Of 4 to 7 tokens each: three batches that wait, the stretch that was begun before, and a batch launched ahead.
    lanes = len(engine._dispatcher.workers)
    assert max(ahead) <= (3 + 2 + 2) * lanes * BUDGET / 4
    assert max(ahead) < len(texts) / 2  # so that the bound says something


@pytest.mark.contract
@pytest.mark.parametrize("threads", [1], indirect=True)
def test_no_batch_is_short_of_texts_before_the_last_ones(threads, folder, monkeypatch):
    """Each batch is held until what is tokenized ahead of it is there: then batches are full."""
    recording.pretend_varlen(monkeypatch)
    monkeypatch.setattr(loading, "_backend", lambda device: Recording())
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    texts, idle, sizes = short_texts(8000), threading.Event(), []
    start = Runner.start

    def held(runner: Runner, requests: Sequence[Request]) -> Any:
        sizes.append(sum(request.length for request in requests))
        wait_for_intake(engine)
        return start(runner, requests)

    def wait_for_intake(engine: Engine) -> None:
        """Two rounds of the one thread: what it was doing, and what that asked for."""
        for _ in range(2):
            engine._dispatcher.threads.submit(idle.set).result(timeout=60)

    monkeypatch.setattr(Runner, "start", held)
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=BUDGET) as engine:
        assert len(engine.embed(texts)) == len(texts)
    assert len(sizes) > 30
    assert min(sizes[:-10]) > 0.99 * BUDGET, sizes  # the last stretch is divided into equal parts


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_several_threads_tokenize_one_call_at_once(threads, folder, monkeypatch):
    """While too few texts wait for batches: two threads wait for each other here."""
    together, reached = threading.Barrier(2), threading.Event()

    def meet(items: Sequence[Any]) -> None:
        if not reached.is_set():
            together.wait(timeout=60)
            reached.set()

    tokenized = Tokenized(monkeypatch, meet)
    texts = short_texts(8000)
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=8192) as engine:
        assert len(engine.embed(texts)) == len(texts) == tokenized.texts
    assert reached.is_set()


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_the_vectors_of_a_long_call_are_those_of_short_ones(threads, engine):
    texts = [*short_texts(4000), *SENTENCES, *SENTENCES]
    found = engine.embed(texts).embeddings
    chosen = [*range(0, 4000, 311), *range(4000, len(texts))]
    assert np.abs(found[chosen] - engine.embed([texts[i] for i in chosen]).embeddings).max() <= 1e-5


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_a_call_that_is_cancelled_midway_is_tokenized_no_further(threads, engine, monkeypatch):
    tokenized, ran = Tokenized(monkeypatch), threading.Event()
    texts = short_texts(12_000)
    future = engine.submit("embed", texts)
    engine.observe(lambda batch: ran.set() if future.cancel() else None)
    assert ran.wait(timeout=60)
    assert len(engine.embed(SENTENCES)) == len(SENTENCES)
    assert tokenized.texts < len(texts)


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_an_error_in_the_middle_fails_its_call_and_no_other(threads, engine, monkeypatch):
    texts = short_texts(8000)

    def refuse(items: Sequence[Any]) -> None:
        if texts[5000] in items:
            raise RuntimeError("no such word")

    Tokenized(monkeypatch, refuse)
    bad = engine.submit("embed", texts)
    good = engine.submit("embed", texts[:3000])
    with pytest.raises(RuntimeError, match="no such word"):
        bad.result(timeout=120)
    assert len(good.result(timeout=120)) == 3000


def test_a_text_that_is_too_long_refuses_the_call_before_any_of_it_runs(engine):
    ran = []
    engine.observe(ran.append)
    texts = [*short_texts(5000), " ".join(SENTENCES * 20)]
    with pytest.raises(InputTooLongError, match="index 5000"):
        engine.submit("embed", texts, PoolingParams(truncate="error")).result(timeout=120)
    assert ran == []
