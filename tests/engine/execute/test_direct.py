"""One text in one call, run in its caller's thread while the engine is idle: as on the ordinary way in everything."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gates import until
from tests.tiny import Dense, LayerNorm, Layout, Normalize, Pooling
from tests.tiny.heads import write_cross_encoder, write_m3, write_pylate, write_stanford
from tests.tiny.static import write_model2vec

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.engine.engine import submission_of
from millpond.engine.execute import direct as direct_module
from millpond.engine.execute.cores import Turn, process_cores
from millpond.engine.execute.direct import Direct, DirectText, most_at_once
from millpond.engine.schedule.admission import Admission
from millpond.errors import EngineClosedError, InvalidRequestError, MillpondError
from millpond.values.outputs import EmbeddingOutput, TokenEmbeddingOutput

PROMPTS = {"query": "search for: ", "document": ""}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"role": "query"},
    {"role": "document", "normalize": False},
    {"prompt": "Represent: ", "dimensions": 16},
    {"dimensions": 30, "normalize": True},
    {"normalize": False, "truncate": "error"},
)
# By family, or one and a number: what pools its rows. Encoders with learnt and rotary positions, a decoder, and heads.
FAMILIES = {
    "bert": Layout(modules=(Pooling(), Normalize()), prompts=PROMPTS),
    "roberta": Layout(modules=(Pooling(modes=("cls",)),), prompts=PROMPTS),
    "modernbert": Layout(modules=(Pooling(include_prompt=False),), prompts=PROMPTS),
    "qwen3": Layout(modules=(Pooling(modes=("lasttoken",)), Normalize()), prompts=PROMPTS),
    "bert-2": Layout(modules=(Pooling(), Dense(out_features=32), LayerNorm(), Normalize()), prompts=PROMPTS),
    "bert-3": Layout(modules=(Pooling(modes=("max", "mean"), include_prompt=False),), prompts=PROMPTS),
    "qwen3-2": Layout(
        modules=(Pooling(modes=("lasttoken",)), Dense(out_features=48, activation="Identity")), prompts=PROMPTS
    ),
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[EmbeddingOutput | None]:
    """What was run directly; ``None`` for a text that went the ordinary way after all."""
    outputs: list[EmbeddingOutput | None] = []
    run = Direct._run

    def recorded(self: Direct, *arguments: Any) -> EmbeddingOutput | None:
        outputs.append(run(self, *arguments))
        return outputs[-1]

    monkeypatch.setattr(Direct, "_run", recorded)
    return outputs


def ordinarily(call: Callable[[], Any]) -> Any:
    """The result of a call on the ordinary way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Admission, "enter_direct", lambda *_: False)
        return call()


def assert_same(output: EmbeddingOutput, expected: EmbeddingOutput) -> None:
    assert output.embeddings.tobytes() == expected.embeddings.tobytes()
    for name in ("embeddings", "cached", "truncated"):
        one, other = getattr(output, name), getattr(expected, name)
        assert (one.shape, one.dtype, one.flags.writeable) == (other.shape, other.dtype, other.flags.writeable)
    assert output.truncated.tolist() == expected.truncated.tolist() and output.usage == expected.usage


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.text(max_size=60) | st.sampled_from(["", " ", "a b c", "Straße", "日本語", "naïve café"]), data=st.data()
)
def test_the_vector_is_that_of_the_ordinary_way(
    family: str,
    text: str,
    data: Any,
    engine_of: Callable[..., Engine],
    checkpoint_of: Callable[..., Path],
    ran: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = checkpoint_of(family.split("-")[0], sentence_transformers=FAMILIES[family])
    engine = engine_of(folder, hf_overrides={"is_matryoshka": True}, backend="native")
    options = data.draw(st.sampled_from(OPTIONS))
    ways: tuple[Callable[[], EmbeddingOutput], ...] = (
        lambda: engine.embed([text], **options),
        lambda: asyncio.run(AsyncEngine(engine).embed([text], **options)),
        lambda: submission_of(engine).start_here("embed", [text], PoolingParams(**options)).result(),
    )
    try:
        text.encode()
        expected = ordinarily(ways[0])
    except (UnicodeEncodeError, InvalidRequestError):
        with pytest.raises(InvalidRequestError):
            engine.embed([text], **options)
        return
    caplog.clear()
    for way in ways:
        ran.clear()
        assert_same(way(), expected)
        assert [output is None for output in ran] == [expected.truncated.any()]
    assert not [record for record in caplog.records if "by itself" in record.message]


@pytest.mark.parametrize("text", ["the river turns", "", "naïve"])
def test_so_is_the_vector_of_a_table(text: str, engine_of: Callable[..., Engine], ran: list[Any]) -> None:
    engine = engine_of(write_model2vec, backend="native")
    expected = ordinarily(lambda: engine.embed([text]))
    ran.clear()
    assert_same(engine.embed([text]), expected)
    assert len(ran) == 1 and ran[0] is not None


@pytest.mark.parametrize("writer", [write_stanford, write_pylate, write_m3])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=40), data=st.data())
def test_token_vectors_are_those_of_the_ordinary_way(
    writer: Callable[[Path], Path], text: str, data: Any, engine_of: Callable[..., Engine], ran: list[Any]
) -> None:
    engine = engine_of(writer, hf_overrides={"is_matryoshka": True}, backend="native")
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"role": "query"},
        {"role": "document", "dimensions": 8},
        {"normalize": False},
    )
    options = data.draw(st.sampled_from(choices))

    def call() -> TokenEmbeddingOutput:
        return engine.token_embed([text], **options)

    expected = ordinarily(call)
    ran.clear()
    for found in (call(), asyncio.run(AsyncEngine(engine).token_embed([text], **options))):
        assert found.embeddings.flat.tobytes() == expected.embeddings.flat.tobytes()
        assert found.embeddings.offsets.tolist() == expected.embeddings.offsets.tolist()
        assert found.embeddings.flat.flags.writeable and found.usage == expected.usage
        assert found.truncated.tolist() == expected.truncated.tolist()
    assert [output is None for output in ran] == [expected.truncated.any()] * 2


@pytest.mark.parametrize("text", ["the river turns", "", "naïve", "word " * 100])
def test_a_pair_that_is_read_together_has_the_ordinary_score(
    text: str, engine_of: Callable[..., Engine], ran: list[Any]
) -> None:
    engine = engine_of(write_cross_encoder, backend="native")
    choices: tuple[dict[str, Any], ...] = ({}, {"activation": "sigmoid"})
    for options in choices:
        expected = ordinarily(partial(engine.score, "who mills?", text, **options))
        ran.clear()
        found = engine.score("who mills?", text, **options)
        ranked = engine.rerank("who mills?", [text], **options)
        awaited = asyncio.run(AsyncEngine(engine).rerank("who mills?", [text], **options))
        assert found.scores.tobytes() == expected.scores.tobytes()
        assert ranked[0].relevance_score == awaited[0].relevance_score == float(expected.scores[0])
        assert (found.method, found.usage) == (expected.method, expected.usage)
        assert found.truncated.tolist() == expected.truncated.tolist()
        assert [output is None for output in ran] == [expected.truncated.any()] * 3


@pytest.mark.parametrize("awaited", [False, True], ids=["Engine", "AsyncEngine"])
@pytest.mark.parametrize("method", ["auto", "cosine"])
def test_the_score_of_one_pair_is_that_of_the_ordinary_way(
    method: Any, awaited: bool, checkpoint_of: Callable[..., Path], engine_of: Callable[..., Engine], ran: list[Any]
) -> None:
    engine = engine_of(checkpoint_of("bert", sentence_transformers=FAMILIES["bert"]), backend="native")

    def score(document: str) -> Any:
        if awaited:
            return asyncio.run(AsyncEngine(engine).score("who mills?", document, method=method))
        return engine.score("who mills?", document, method=method)

    ran.clear()
    for document in ("the river", "a mill", "word " * 100):
        before = engine.stats()
        expected = ordinarily(partial(engine.score, "who mills?", document, method=method))
        between = engine.stats()
        found = score(document)
        assert found.scores.tobytes() == expected.scores.tobytes() and found.scores.shape == (1,)
        assert (found.method, found.usage) == (expected.method, expected.usage)
        assert found.truncated.tolist() == expected.truncated.tolist()
        counted = [
            (stats.calls_done, stats.texts_done, stats.texts_truncated) for stats in (before, between, engine.stats())
        ]
        assert [b - a for a, b in zip(*counted[:2], strict=True)] == [b - a for a, b in zip(*counted[1:], strict=True)]
    assert sorted(output is None for output in ran) == [False] * 5 + [True]
    with pytest.raises(InvalidRequestError, match="the document at index 0 is a int"):
        engine.score("who mills?", [7], method=method)  # type: ignore[list-item]


def test_what_is_not_plain_goes_the_ordinary_way(engine_of: Callable[..., Engine], ran: list[Any]) -> None:
    engine = engine_of("minilm", hf_overrides={"is_matryoshka": True})
    plain = engine.embed(["a"])
    for options in ({"output_dtype": "float16"}, {"long_texts": "mean"}, {"show_progress": True}):
        for _ in range(2):
            engine.embed(["a"], **options)
    for texts in (["a", "b"], [], ("a",)):
        engine.embed(texts)
    with pytest.raises(InvalidRequestError, match="the text at index 0 is a int"):
        engine.embed([7])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="not a str"):
        engine.embed("a")
    assert not ran
    assert engine.embed(["word " * 300]).truncated.all() and ran == [None]  # known when it is tokenized
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        engine.embed(["\ud800"])
    assert_same(engine.embed(["a"]), plain)


class Held:
    """The direct way of an engine's plain texts, which waits in the forward until it is let go on."""

    def __init__(self, engine: Engine) -> None:
        engine.embed(["a"])
        engine._dispatcher._admission.wait_until_idle()  # a worker may have run it, and not yet have released it
        (self.direct,) = (one for one in submission_of(engine)._direct.values() if isinstance(one, DirectText))
        self.begun, self.going = threading.Event(), threading.Event()
        self.error: Exception | None = None
        vector = self.direct._vector

        def held(ids: Any, threads: int) -> Any:
            self.begun.set()
            assert self.going.wait(60)
            if self.error is not None:
                raise self.error
            return vector(ids, threads)

        held.wake = vector.wake  # type: ignore[attr-defined]
        self.direct._vector = held  # type: ignore[assignment]


@pytest.fixture
def engine(minilm_folder: Path) -> Iterator[Engine]:
    with Engine(minilm_folder, dtype="float32", device="cpu") as engine:
        yield engine


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_it_is_counted_and_observed_as_a_call(engine: Engine) -> None:
    engine.embed(["a b"])
    seen: list[Any] = []
    forget = engine.observe(seen.append)
    before = engine.stats()
    engine.embed(["a b"])
    direct = engine.stats()
    ordinarily(lambda: engine.embed(["a b"]))
    forget()
    ordinary = engine.stats()
    for name in ("calls_done", "texts_done", "batches", "batch_texts", "batch_tokens", "calls_failed", "cache_misses"):
        first, second, third = (getattr(stats, name) for stats in (before, direct, ordinary))
        assert second - first == third - second, name
    assert direct.calls_done == before.calls_done + 1 and direct.batch_seconds > before.batch_seconds
    assert [(batch.texts, batch.tokens) for batch in seen] == [(1, 4), (1, 4)]
    timings = submission_of(engine).start_here("embed", ["a b"], PoolingParams()).timings
    assert timings is not None and timings.queue + timings.inference <= timings.total


def test_others_are_served_meanwhile_and_close_waits_for_it(engine: Engine) -> None:
    held = Held(engine)
    first, results = in_thread(lambda: engine.embed(["a"]))
    try:
        assert held.begun.wait(60)
        stats = engine.stats()
        assert (stats.waiting_texts, stats.running_calls, stats.running_batches) == (1, 1, 1)
        second, others = in_thread(lambda: engine.embed(["b"]))  # perhaps behind the first one's cores
        while engine.stats().running_calls < 2 and second.is_alive():
            second.join(0.01)
        closing, _ = in_thread(engine.close)
        while not engine.closed:
            closing.join(0.01)
        with pytest.raises(EngineClosedError):
            engine.embed(["a"])
        assert first.is_alive() and closing.is_alive()
    finally:
        held.going.set()
    for thread in (first, second, closing):
        thread.join(60)
    assert len(results) == len(others) == 1 and process_cores().free == process_cores().count


def test_an_error_leaves_nothing_behind_and_the_ordinary_way_answers(
    engine: Engine, ran: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(engine)
    held.going.set()
    held.error = MemoryError()
    expected = ordinarily(lambda: engine.embed(["a"]))
    assert_same(engine.embed(["a"]), expected)
    assert ran == [None] and process_cores().free == process_cores().count
    assert [record.message for record in caplog.records] == [
        "a text could not be run by itself (MemoryError); it is queued"
    ]
    stats = engine.stats()
    assert (stats.running_calls, stats.waiting_texts, stats.running_batches, stats.calls_failed) == (0, 0, 0, 0)


TEXTS = ("a", "a b c", "", "mill", "w " * 40, "a")


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_texts_that_wait_for_a_core_are_run_together(
    family: str, engine_of: Callable[..., Engine], checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoint_of(family, sentence_transformers=FAMILIES[family]), backend="native")
    expected = [ordinarily(partial(engine.embed, [text], prompt="turn: ")) for text in TEXTS]
    before = engine.stats().batches
    for found, one in zip(in_line(engine, TEXTS, monkeypatch, prompt="turn: "), expected, strict=True):
        assert_same(found, one)
    after = engine.stats()
    assert after.batches - before < len(TEXTS) and (after.running_calls, after.waiting_texts) == (0, 0)


def test_an_error_of_texts_that_are_run_together_leaves_each_to_the_ordinary_way(
    engine: Engine, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [ordinarily(partial(engine.embed, [text])) for text in TEXTS]
    held = Held(engine)
    held.going.set()
    held.error = MemoryError()
    for found, one in zip(in_line(engine, TEXTS, monkeypatch), expected, strict=True):
        assert_same(found, one)
    assert ran.count(None) > 1


def in_line(
    engine: Engine, texts: Sequence[str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[EmbeddingOutput]:
    """The outputs of texts whose callers come while all cores are taken."""
    monkeypatch.setattr(direct_module, "_PATIENCE", 60.0)
    monkeypatch.setattr(direct_module, "_TURNS", len(texts))
    cores = process_cores()
    taken = cores.widen(cores.count) + cores.claim(turn=Turn(spare=1))
    threads = []
    try:
        for number, text in enumerate(texts, 1):
            threads.append(in_thread(partial(engine.embed, [text], **options)))
            until(lambda number=number: len(cores._waiting) == number)  # type: ignore[misc]
    finally:
        cores.release(taken)
    for thread, _ in threads:
        thread.join(60)
    assert cores.free == cores.count
    return [results[0] for _, results in threads]


def test_a_vector_that_is_not_finite_is_the_ordinary_error(engine: Engine, ran: list[Any]) -> None:
    engine.embed(["a"])
    model = engine._replicas.runner.model
    model.encoder.plan.model.steps[0].scale = float("inf")  # type: ignore[attr-defined]
    with pytest.raises(MillpondError, match="not finite"):
        engine.embed(["a"])
    assert ran == [None]
    with pytest.raises(MillpondError, match="not finite"):
        engine.embed(["a"], normalize=False)


@pytest.mark.parametrize("pair", [False, True], ids=["embed", "score"])
def test_a_task_that_is_cancelled_before_its_turn_leaves_nothing_behind(engine: Engine, pair: bool) -> None:
    held = Held(engine)
    held.going.set()
    if pair:
        engine.score("a", "b", method="cosine")
    held.begun.clear()
    blocked = threading.Event()
    for _ in range(most_at_once(process_cores())):
        engine._dispatcher._direct_threads.submit(blocked.wait, 60)

    async def cancelled() -> None:
        waiting = AsyncEngine(engine)
        call: Any = waiting.score("a", "b", method="cosine") if pair else waiting.embed(["a"])
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)  # the task begins, and hands its texts over
        assert engine.stats().running_calls == (2 if pair else 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert engine.stats().running_calls == engine.stats().waiting_texts == 0
    blocked.set()
    assert not held.begun.is_set()
    assert len(engine.embed(["a"])) == 1 and held.begun.is_set()


def test_ctrl_c_waits_for_the_end_of_the_forward(engine: Engine) -> None:
    held = Held(engine)
    held.going.set()
    vector = held.direct._vector

    def interrupted(ids: Any, threads: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return vector(ids, threads)

    interrupted.wake = vector.wake  # type: ignore[attr-defined]
    held.direct._vector = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.embed(["a"])
    assert engine.stats().running_calls == 0 and process_cores().free == process_cores().count
    held.direct._vector = vector
    assert len(engine.embed(["a"])) == 1
