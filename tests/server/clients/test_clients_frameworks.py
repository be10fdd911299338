"""LangChain's and LlamaIndex's clients of OpenAI against a server on a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tiktoken
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from tests.server.conftest import running
from tests.tiny import SENTENCES

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig

pytestmark = pytest.mark.contract

TEXTS = ["", "a", *SENTENCES[:4]]
LONG = " ".join(SENTENCES)
KEY = "sk-of-the-mill"
PATIENCE = 300.0


@pytest.fixture(scope="module")
def models(embedder: Path) -> ServedModels:
    overrides = {"is_matryoshka": True}
    return ServedModels.load(
        [ModelConfig(model=str(embedder), names=("mill/vectors",), dtype="float32", hf_overrides=overrides)]
    )


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with running(models, ServerConfig(api_keys=(KEY,))) as address:
        yield address


@pytest.fixture
def engine(models: ServedModels) -> Engine:
    return next(iter(models)).engine


# --- LangChain ------------------------------------------------------------------------------------------------------


def langchain(address: str, **options: Any) -> OpenAIEmbeddings:
    """With the option from docs/server.md texts are sent unchanged."""
    settings = {"check_embedding_ctx_length": False, "max_retries": 0, "timeout": PATIENCE, **options}
    return OpenAIEmbeddings(model="mill/vectors", base_url=f"{address}/v1", api_key=KEY, **settings)


@pytest.mark.parametrize("chunk_size", [1000, 4])
def test_langchain(address: str, engine: Engine, chunk_size: int) -> None:
    embeddings = langchain(address, chunk_size=chunk_size)
    expected = engine.embed(TEXTS).embeddings
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[2]), expected[2], atol=1e-6)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """Replaces tiktoken's download: an encoding of bytes, with ids above any vocabulary here."""
    ranks = {bytes([byte]): byte + (byte == ord("z")) * 100_000 for byte in range(256)}
    encoding = tiktoken.Encoding("cl100k_base", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"cl100k_base": encoding}[name])
    return encoding


def test_langchain_left_to_itself_sends_the_ids_of_another_vocabulary(
    address: str, engine: Engine, offline: tiktoken.Encoding
) -> None:
    """Why docs/server.md recommends check_embedding_ctx_length=False: otherwise the vectors are wrong or missing."""
    embeddings = langchain(address, check_embedding_ctx_length=True)
    with pytest.raises(openai.BadRequestError, match="index 1 .* out of vocabulary"):
        embeddings.embed_documents(["mill", "buzz"])
    (actual,), (expected,) = embeddings.embed_documents(["mill"]), engine.embed(["mill"]).embeddings
    assert float(np.dot(actual, expected)) < 0.99
    assert offline.encode_ordinary("mill") == list(b"mill")


def test_langchain_may_cut_texts_with_the_models_tokenizer(address: str, engine: Engine, embedder: Path) -> None:
    """LangChain embeds the pieces of a long text separately and averages them."""
    embeddings = langchain(
        address,
        check_embedding_ctx_length=True,
        tiktoken_enabled=False,
        tiktoken_model_name=str(embedder),
        embedding_ctx_length=30,
    )
    short = "the mill stands by the pond"
    np.testing.assert_allclose(embeddings.embed_documents([short]), engine.embed([short]).embeddings, atol=1e-6)
    (actual,) = embeddings.embed_documents([LONG])
    assert np.linalg.norm(actual) == pytest.approx(1, abs=1e-5)


# --- LlamaIndex -----------------------------------------------------------------------------------------------------


def llama_index(address: str, **options: Any) -> OpenAILikeEmbedding:
    settings = {"max_retries": 0, "timeout": PATIENCE, **options}
    return OpenAILikeEmbedding(model_name="mill/vectors", api_base=f"{address}/v1", api_key=KEY, **settings)


@pytest.mark.parametrize("size", [2, 100])
def test_llama_index(address: str, engine: Engine, size: int) -> None:
    model = llama_index(address, embed_batch_size=size)
    expected = engine.embed(TEXTS[1:]).embeddings
    np.testing.assert_allclose(model.get_text_embedding_batch(TEXTS[1:]), expected, atol=1e-6)
    np.testing.assert_allclose(model.get_text_embedding(TEXTS[2]), expected[1], atol=1e-6)
    np.testing.assert_allclose(model.get_query_embedding(TEXTS[2]), expected[1], atol=1e-6)
