"""Ollama's clients, as installed, against a server with the real all-MiniLM-L6-v2: vectors are the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import ollama
import pytest

from millpond import Engine
from millpond.server import ModelConfig, ServedModels
from tests.server.conftest import running

pytestmark = pytest.mark.door

MODEL = "all-minilm"
TEXTS = ["The mill stands by the pond.", "Water turns the wheel.", ""]
LONG = "The wheel of the mill turns in the water of the pond. " * 40


@pytest.fixture(scope="module")
def models(minilm: str) -> ServedModels:
    """The real model, called as Ollama calls it."""
    print(f"ollama {version('ollama')}")
    return ServedModels.load([ModelConfig(model=minilm, names=(MODEL,), device="cpu", dtype="float32")])


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models) as address:
        yield address


@pytest.fixture
def engine(models: ServedModels, address: str) -> Engine:
    return next(iter(models)).engine


def same(rows: object, expected: object) -> None:
    np.testing.assert_allclose(np.array(rows), expected, atol=1e-6)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_the_client_embeds(address: str, engine: Engine, name: str) -> None:
    client = ollama.Client(address)
    answer = client.embed(name, TEXTS, keep_alive="5m", options={"num_ctx": 2048})
    expected = engine.embed(TEXTS)
    same(answer.embeddings, expected.embeddings)
    assert (answer.model, answer.prompt_eval_count) == (name, expected.usage.prompt_tokens)
    assert answer.total_duration and answer.total_duration > 10**5  # nanoseconds
    same(client.embed(name, TEXTS[0]).embeddings, expected.embeddings[:1])
    assert client.embed(name, []).embeddings == client.embed(name, "").embeddings == []


def test_the_client_cuts_or_refuses(address: str, engine: Engine) -> None:
    client = ollama.Client(address)
    same(client.embed(MODEL, LONG).embeddings, engine.embed([LONG]).embeddings)
    with pytest.raises(ollama.ResponseError, match="maximum context length is 256 tokens") as refused:
        client.embed(MODEL, LONG, truncate=False)
    assert refused.value.status_code == 400
    short = client.embed(MODEL, LONG, options=ollama.Options(num_ctx=16)).embeddings
    assert np.abs(np.array(short) - engine.embed([LONG]).embeddings).max() > 0.01


def test_the_older_route_does_not_normalize(address: str, engine: Engine) -> None:
    vector = ollama.Client(address).embeddings(MODEL, TEXTS[0]).embedding
    same(vector, engine.embed(TEXTS[:1], normalize=False).embeddings[0])
    assert abs(np.linalg.norm(vector) - 1) > 0.01  # the negative control


def test_the_client_finds_the_models(address: str) -> None:
    client = ollama.Client(address)
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == f"{MODEL}:latest"
    assert loaded.context_length == 256 and listed.modified_at is not None and len(listed.digest or "") == 64
    shown = client.show(MODEL)
    assert shown.capabilities == ["embedding"]
    assert (shown.modelinfo or {})["bert.embedding_length"] == 384
    assert shown.details is not None and shown.details.family == "bert"


def test_an_unknown_model_is_ollamas_error(address: str) -> None:
    client = ollama.Client(address)
    for ask in (lambda: client.embed("no", "a"), lambda: client.show("no"), lambda: client.embeddings("no", "a")):
        with pytest.raises(ollama.ResponseError) as refused:
            ask()
        assert (refused.value.error, refused.value.status_code) == (
            'model "no" not found, try pulling it first',
            404,
        )


def test_dimensions_are_refused_without_matryoshka(address: str, engine: Engine) -> None:
    client = ollama.Client(address)
    same(client.embed(MODEL, TEXTS, dimensions=384).embeddings, engine.embed(TEXTS).embeddings)
    with pytest.raises(ollama.ResponseError, match="does not support Matryoshka"):
        client.embed(MODEL, TEXTS, dimensions=64)


def test_langchains_class(address: str, engine: Engine) -> None:
    from langchain_ollama import OllamaEmbeddings

    embeddings = OllamaEmbeddings(
        model=MODEL, base_url=address, validate_model_on_init=True, num_ctx=512, temperature=0.1, keep_alive=60
    )
    expected = engine.embed(TEXTS).embeddings
    same(embeddings.embed_documents(TEXTS), expected)
    same(asyncio.run(embeddings.aembed_query(TEXTS[1])), expected[1])
    with pytest.raises(ValueError, match="not found"):
        OllamaEmbeddings(model="no", base_url=address, validate_model_on_init=True)


def test_langchains_init_embeddings(address: str, engine: Engine) -> None:
    from langchain.embeddings import init_embeddings

    embeddings = init_embeddings(f"ollama:{MODEL}", base_url=address)
    same(embeddings.embed_documents(TEXTS), engine.embed(TEXTS).embeddings)


def test_llamaindexs_class(address: str, engine: Engine) -> None:
    from llama_index.embeddings.ollama import OllamaEmbedding

    embedding = OllamaEmbedding(model_name=MODEL, base_url=address)
    expected = engine.embed(TEXTS[:2]).embeddings
    same(embedding.get_text_embedding_batch(TEXTS[:2]), expected)
    same(embedding.get_query_embedding(TEXTS[0]), expected[0])
    same(asyncio.run(embedding.aget_text_embedding(TEXTS[1])), expected[1])


def test_chromas_function(address: str, engine: Engine) -> None:
    from chromadb.utils.embedding_functions import OllamaEmbeddingFunction

    function = OllamaEmbeddingFunction(url=address, model_name=MODEL)
    same(function(TEXTS), engine.embed(TEXTS).embeddings)
