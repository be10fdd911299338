"""The vectors of MillpondEmbedding are the engine's, with the right role, for sync and async callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.storage.kvstore import SimpleKVStore
from tests.gates import LoopGate, batches_held, batches_through

from llama_index.embeddings.millpond import MillpondEmbedding
from millpond import Engine
from millpond.engine import engine as engine_module
from millpond.errors import EngineOverloadedError, InputTooLongError, InvalidRequestError

PROMPTS = {"query": "search_query: ", "document": "search_document: "}


def many(count: int) -> list[str]:
    return [f"the {i}th passage of {count}, about {i * i} things" for i in range(count)]


@pytest.mark.parametrize("prompt", ["ask: ", ""])
def test_prompts_of_the_caller_win(prompted: str, engine: Engine, prompt: str) -> None:
    embedding = MillpondEmbedding(model_name=prompted, dtype="float32", query_prompt=prompt, document_prompt=prompt)
    expected = engine.embed(["tides"], prompt=prompt).embeddings[0]
    np.testing.assert_allclose(embedding.get_text_embedding("tides"), expected, atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding("tides"), expected, atol=1e-6)


def test_options_reach_the_engine(minilm: str, engine: Engine, texts: list[str]) -> None:
    full = engine.embed(texts, normalize=False).embeddings
    raw = MillpondEmbedding(engine=engine, normalize=False).get_text_embedding_batch(texts)
    np.testing.assert_allclose(raw, full, atol=1e-6)
    cut = MillpondEmbedding(model_name=minilm, dtype="float32", dimensions=64, hf_overrides={"is_matryoshka": True})
    expected = full[:, :64] / np.linalg.norm(full[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(cut.get_text_embedding_batch(texts), expected, atol=1e-6)
    with pytest.raises(InputTooLongError, match="max_length=4"):
        MillpondEmbedding(model_name=minilm, max_length=4, truncate="error").get_text_embedding(texts[0])


async def test_a_long_text_is_read_to_its_end_in_windows(engine: Engine, texts: list[str]) -> None:
    long = " ".join(texts * 8)
    expected = engine.embed([long], role="document", long_texts="mean").embeddings[0]
    embedding = MillpondEmbedding(engine=engine, long_texts="mean")
    np.testing.assert_allclose(embedding.get_text_embedding(long), expected, atol=1e-6)
    np.testing.assert_allclose((await embedding.aget_text_embedding_batch([long]))[0], expected, atol=1e-6)
    cut = MillpondEmbedding(engine=engine).get_text_embedding(long)
    assert np.abs(np.array(cut) - expected).max() > 1e-3


def test_texts_are_embedded_as_they_are(minilm: str, tmp_path: Path) -> None:
    text = " two\nlines,  two spaces\t"
    MillpondEmbedding(model_name=minilm, dtype="float32", cache=str(tmp_path / "c.db")).get_text_embedding(text)
    # Cache keys depend on the exact characters, so a hit shows which text reached the engine.
    with Engine(minilm, dtype="float32", cache=tmp_path / "c.db") as engine:
        seen = engine.embed([text, text.replace("\n", " "), text.strip()], role="document").cached
    assert seen.tolist() == [True, False, False]


def test_bad_texts_are_named(engine: Engine) -> None:
    embedding = MillpondEmbedding(engine=engine)
    bad: Any = ["a", None]
    with pytest.raises(InvalidRequestError, match="index 1 is a NoneType"):
        embedding.get_text_embedding_batch(bad)
    with pytest.raises(InvalidRequestError, match="index 1 is a NoneType"):
        asyncio.run(embedding.aget_text_embedding_batch(bad))


def test_no_texts_no_vectors(engine: Engine) -> None:
    embedding = MillpondEmbedding(engine=engine)
    assert embedding.get_text_embedding_batch([]) == []
    assert asyncio.run(embedding.aget_text_embedding_batch([])) == []


async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the adapter took a thread of the loop's pool")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
    embedding = MillpondEmbedding(engine=engine)
    gate = LoopGate()
    with batches_through(gate, engine):
        assert len(await gate.run(embedding.aget_text_embedding_batch(many(400)))) == 400
    assert gate.calls
    assert not gate.blocked
    gate = LoopGate(seconds=0.2)
    with batches_through(gate, engine):
        await gate.run(BaseEmbedding._aget_text_embedding(embedding, "tides"))
    assert gate.blocked  # as the base class does; the gate detects it


async def test_the_loop_goes_on_while_a_model_loads(minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = MillpondEmbedding(
        model_name=minilm, dtype="float32", max_batch_tokens=1112
    )  # an engine that no other test shares
    gate = LoopGate()
    monkeypatch.setattr(engine_module, "load", gate.hold(engine_module.load))
    await gate.run(embedding.aget_query_embedding("tides"))
    assert gate.calls == ["load"]
    assert not gate.blocked


async def test_a_corpus_larger_than_the_queue_waits_for_its_turn(minilm: str) -> None:
    texts = many(48)
    with Engine(minilm, dtype="float32", max_queue=20) as engine:
        embedding = MillpondEmbedding(engine=engine, embed_batch_size=8)
        vectors = await embedding.aget_text_embedding_batch(texts)
        np.testing.assert_allclose(vectors, engine.embed(texts).embeddings, atol=1e-6)
        # A query raises, so that its caller can react.
        with batches_held(engine), pytest.raises(EngineOverloadedError):
            await asyncio.gather(*(embedding.aget_query_embedding(text) for text in texts))


def test_embeddings_cache_still_works(engine: Engine) -> None:
    store = SimpleKVStore()
    embedding = MillpondEmbedding(engine=engine, embeddings_cache=store)
    first = embedding.get_text_embedding_batch(["a", "b"])
    store.put("c", {"any": [1.0, 2.0]}, collection="embeddings")
    assert embedding.get_text_embedding_batch(["b", "c", "a"]) == [first[1], [1.0, 2.0], first[0]]
    assert asyncio.run(embedding.aget_text_embedding_batch(["c", "a"])) == [[1.0, 2.0], first[0]]
