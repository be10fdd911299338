"""The vectors of MillpondEmbeddings are the engine's, with the right role, for sync and async callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gates import LoopGate, batches_held, batches_through, until_set

from langchain_millpond import MillpondEmbeddings
from millpond import Engine
from millpond.engine import engine as engine_module
from millpond.errors import InputTooLongError, InvalidRequestError

PROMPTS = {"query": "search_query: ", "document": "search_document: "}


def many(count: int) -> list[str]:
    return [f"the {i}th passage of {count}, about {i * i} things" for i in range(count)]


@pytest.mark.parametrize("prompt", ["ask: ", ""])
def test_prompts_of_the_caller_win(prompted: str, engine: Engine, prompt: str) -> None:
    embeddings = MillpondEmbeddings(model=prompted, dtype="float32", query_prompt=prompt, document_prompt=prompt)
    expected = engine.embed(["tides"], prompt=prompt).embeddings
    np.testing.assert_allclose(embeddings.embed_documents(["tides"]), expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query("tides"), expected[0], atol=1e-6)


def test_options_reach_the_engine(minilm: str, engine: Engine, texts: list[str]) -> None:
    full = engine.embed(texts, normalize=False).embeddings
    raw = MillpondEmbeddings(engine=engine, normalize=False).embed_documents(texts)
    np.testing.assert_allclose(raw, full, atol=1e-6)
    cut = MillpondEmbeddings(model=minilm, dtype="float32", dimensions=64, hf_overrides={"is_matryoshka": True})
    expected = full[:, :64] / np.linalg.norm(full[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(cut.embed_documents(texts), expected, atol=1e-6)


def test_a_long_text_is_cut_or_refused_as_told(minilm: str) -> None:
    long = "word " * 20 + "tail"
    options: dict[str, Any] = {"model": minilm, "dtype": "float32", "max_length": 8}
    head = MillpondEmbeddings(**options).embed_query(long)
    assert head == MillpondEmbeddings(**options).embed_query("word " * 20)
    assert head != MillpondEmbeddings(**options, truncate="start").embed_query(long)
    with pytest.raises(InputTooLongError, match="max_length=8"):
        MillpondEmbeddings(**options, truncate="error").embed_documents(["short", long])


def test_texts_are_embedded_as_they_are(minilm: str, tmp_path: Path) -> None:
    text = " two\nlines,  two spaces\t"
    MillpondEmbeddings(model=minilm, dtype="float32", cache=str(tmp_path / "c.db")).embed_documents([text])
    # Cache keys depend on the exact characters, so a hit shows which text reached the engine.
    with Engine(minilm, dtype="float32", cache=tmp_path / "c.db") as engine:
        seen = engine.embed([text, text.replace("\n", " "), text.strip()], role="document").cached
    assert seen.tolist() == [True, False, False]


def test_the_numbers_are_builtin_floats(engine: Engine) -> None:
    embeddings = MillpondEmbeddings(engine=engine)
    for vector in (embeddings.embed_query("a"), *embeddings.embed_documents(["a", "b"])):
        assert isinstance(vector, list)
        assert {type(number) for number in vector} == {float}


@pytest.mark.slow
def test_a_hundred_thousand_texts_in_one_call(minilm: str) -> None:
    # Few distinct texts at a small width, since only the size of the call matters.
    embeddings = MillpondEmbeddings(model=minilm, dtype="float32", dimensions=8, hf_overrides={"is_matryoshka": True})
    distinct = many(50)
    vectors = embeddings.embed_documents(distinct * 2000)
    assert len(vectors) == 100_000
    np.testing.assert_allclose(vectors[-50:], embeddings.embed_documents(distinct), atol=1e-6)


def test_no_texts_no_vectors(engine: Engine) -> None:
    embeddings = MillpondEmbeddings(engine=engine)
    assert embeddings.embed_documents([]) == []
    assert asyncio.run(embeddings.aembed_documents([])) == []


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("one text", TypeError, "not a str"),
        (["a", None], InvalidRequestError, "index 1 is a NoneType"),
        (["a", "\ud800"], InvalidRequestError, "index 1 holds a lone surrogate"),
    ],
)
def test_bad_texts_are_named(engine: Engine, texts: Any, error: type[Exception], message: str) -> None:
    embeddings = MillpondEmbeddings(engine=engine)
    with pytest.raises(error, match=message):
        embeddings.embed_documents(texts)
    with pytest.raises(error, match=message):
        asyncio.run(embeddings.aembed_documents(texts))


async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the adapter took a thread of the loop's pool")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
    embeddings = MillpondEmbeddings(engine=engine)
    gate = LoopGate()
    with batches_through(gate, engine):
        assert len(await gate.run(embeddings.aembed_documents(many(400)))) == 400
    assert gate.calls
    assert not gate.blocked

    async def blocks() -> list[list[float]]:
        return embeddings.embed_documents(many(40))

    gate = LoopGate(seconds=0.2)
    with batches_through(gate, engine):
        await gate.run(blocks())
    assert gate.blocked  # the gate detects a blocked loop


async def test_the_loop_goes_on_while_a_model_loads(minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = MillpondEmbeddings(
        model=minilm, dtype="float32", max_batch_tokens=1111
    )  # an engine that no other test shares
    gate = LoopGate()
    monkeypatch.setattr(engine_module, "load", gate.hold(engine_module.load))
    await gate.run(embeddings.aembed_query("tides"))
    assert gate.calls == ["load"]
    assert not gate.blocked


async def test_a_cancelled_call_leaves_the_engine_working(engine: Engine) -> None:
    embeddings = MillpondEmbeddings(engine=engine)
    with batches_held(engine) as due:
        call = asyncio.ensure_future(embeddings.aembed_documents(many(2000)))
        await until_set(due)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    query = await embeddings.aembed_query("tides")
    np.testing.assert_allclose(query, engine.embed(["tides"]).embeddings[0], atol=1e-6)
