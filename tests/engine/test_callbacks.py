"""Calls made in a future's callback, which runs in a thread that other callers wait for."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine, PoolingParams, VectorCache
from millpond.engine import dispatcher
from millpond.engine.execute.cores import Cores
from millpond.engine.execute.runner import Runner
from millpond.engine.execute.worker_slots import DeviceWorkerSlot
from millpond.engine.schedule import scheduler
from millpond.errors import MillpondError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("callbacks") / "model", "bert")


@pytest.fixture(params=[1, 2])
def cores(request, monkeypatch):
    cores = Cores(request.param)
    monkeypatch.setattr(dispatcher, "process_cores", lambda: cores)
    return cores


def chained(first, second, count, texts):
    """``count`` calls of ``first``, each with a callback that calls ``second``; returns the callbacks' results."""
    got, lock, over = [], threading.Lock(), threading.Event()
    attached, run = threading.Event(), Runner.run

    def held(runner, requests):  # a call that is done already runs its callback in the thread that adds it
        assert attached.wait(60)
        return run(runner, requests)

    def again(_):
        try:
            found = second.embed(texts)
        except Exception as error:  # reported to the test
            found = error
        with lock:
            got.append(found)
            if len(got) == count:
                over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", held)
        for i in range(count):
            first.submit("embed", [f"{SENTENCES[i % 5]} {i}"], PoolingParams()).add_done_callback(again)
        attached.set()
        assert over.wait(60), f"{len(got)} of {count} callbacks ended"
    return got


@pytest.mark.parametrize("texts", [SENTENCES[:1], SENTENCES * 5], ids=["one", "many"])
@pytest.mark.parametrize("count", [1, 8])
def test_a_callback_may_call_its_own_engine(checkpoint, cores, count, texts):
    with Engine(checkpoint, dtype="float32") as engine:
        expected = engine.embed(texts).embeddings
        for found in chained(engine, engine, count, texts):
            assert np.abs(found.embeddings - expected).max() <= 1e-6
    assert cores.free == cores.count


def test_a_callback_may_call_another_engine(checkpoint, cores):
    """The core is not held while callbacks run: the other engine may need it."""
    with Engine(checkpoint, dtype="float32") as engine, Engine(checkpoint, dtype="float32") as other:
        expected = other.embed(SENTENCES).embeddings
        for found in chained(engine, other, 6, SENTENCES):
            assert np.abs(found.embeddings - expected).max() <= 1e-6


@pytest.mark.parametrize("large", [False, True], ids=["texts", "a large text"])
def test_a_callback_in_the_only_thread_that_tokenizes_may_make_a_call_of_many_texts(
    checkpoint, tmp_path, monkeypatch, large
):
    """Whoever waits for that thread would wait for itself: a call that is all in the cache ends there."""
    monkeypatch.setattr(dispatcher, "_intake_threads", lambda replicas: 1)
    texts = [f"text {i}" for i in range(2500)] + ["mill " * 50_000] * large
    begins, looked_up, where, got = threading.Event(), VectorCache.get, [], []

    def held(cache, keys, **options):
        assert begins.wait(60)
        return looked_up(cache, keys, **options)

    def again(_):
        where.append(threading.current_thread().name)
        got.append(len(engine.embed(texts).embeddings))
        over.set()

    with VectorCache(tmp_path / "vectors.db") as cache:
        engine = Engine(checkpoint, dtype="float32", cache=cache, max_batch_tokens=512)
        engine.embed(SENTENCES)
        over = threading.Event()
        monkeypatch.setattr(VectorCache, "get", held)
        engine.submit("embed", SENTENCES, PoolingParams()).add_done_callback(again)
        begins.set()
        ended = over.wait(60)
        engine.close(cancel=not ended)
    assert ended and got == [len(texts)] and "intake" in where[0]


def test_a_callback_in_the_thread_of_a_device_gets_an_error(checkpoint, monkeypatch):
    """The thread would wait for itself."""
    monkeypatch.setattr(dispatcher, "CpuWorkerSlots", lambda threads, cores: DeviceWorkerSlot())
    with Engine(checkpoint, dtype="float32") as engine:
        (found,) = chained(engine, engine, 1, SENTENCES[:1])
        assert isinstance(found, MillpondError) and "engine.submit" in str(found)
        assert engine.embed(SENTENCES).embeddings.shape[0] == len(SENTENCES)


def test_a_worker_survives_a_bug_in_the_scheduler(checkpoint, monkeypatch, caplog):
    right, failed = scheduler.Scheduler._pick, []

    def once(self, lanes):
        if not failed:
            failed.append(True)
            raise RuntimeError("a bug")
        return right(self, lanes)

    with Engine(checkpoint, dtype="float32") as engine:
        engine.embed(SENTENCES)
        monkeypatch.setattr(scheduler.Scheduler, "_pick", once)
        future = engine.submit("embed", SENTENCES, PoolingParams())
        assert not wait([future], timeout=60).not_done
        assert future.result().embeddings.shape[0] == len(SENTENCES)
    assert failed and "a batch was lost" in caplog.text
