"""The vectors of MillpondEmbedding are the engine's, with the right role, for sync and async callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.storage.kvstore import SimpleKVStore
from tests.adapters import many
from tests.gates import batches_held

from llama_index.embeddings.millpond import MillpondEmbedding
from millpond import Engine
from millpond.errors import EngineOverloadedError


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


@pytest.mark.parametrize("error", [MemoryError("out of memory"), RuntimeError("device lost")], ids=["memory", "device"])
def test_an_error_comes_at_once_and_the_call_is_not_repeated(
    minilm: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    # HuggingFaceEmbedding tries three times, with seconds between, whatever the error is.
    with Engine(minilm, dtype="float32") as engine:
        embedding, calls = MillpondEmbedding(engine=engine), []
        embed = engine.embed

        def failing(texts: Any, **options: Any) -> Any:
            calls.append(list(texts))
            raise error

        monkeypatch.setattr(engine, "embed", failing)
        with pytest.raises(type(error), match=str(error)):
            embedding.get_text_embedding_batch(["tides"])
        assert calls == [["tides"]]
        monkeypatch.setattr(engine, "embed", embed)
        assert embedding.get_text_embedding("tides")


def test_a_whole_batch_is_one_call_of_the_engine(minilm: str, texts: list[str]) -> None:
    # The base class passes 10 texts at a time.
    with Engine(minilm, dtype="float32") as engine:
        MillpondEmbedding(engine=engine).get_text_embedding_batch(texts * 4)
        assert engine.stats().calls_done == 1


@pytest.mark.skipif(
    not hasattr(MillpondEmbedding, "to_payload"), reason="llama-index-core 0.13 has no payload of events"
)
def test_an_event_carries_no_credentials(minilm: str) -> None:
    payload = MillpondEmbedding(minilm, hf_overrides={"secret": "hf_secret"}).to_payload()
    assert payload == {"class_name": "MillpondEmbedding", "model_name": minilm, "embed_batch_size": 2048}
