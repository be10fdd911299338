"""LangChain's and LlamaIndex's clients of OpenAI against a server on a port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from tests.server.conftest import running
from tests.tiny import SENTENCES

from millpond import Engine
from millpond.server import ModelConfig, ServedModels, ServerConfig

pytestmark = pytest.mark.contract

TEXTS = ["", "a", *SENTENCES[:4]]
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
