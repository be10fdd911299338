"""LangChain's own suites: embeddings in every way they are made, and the byte store in every kind of file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_classic.storage import EncoderBackedStore
from langchain_core.embeddings import Embeddings
from langchain_core.stores import BaseStore
from langchain_tests.integration_tests import BaseStoreAsyncTests, BaseStoreSyncTests, EmbeddingsIntegrationTests

from langchain_millpond import MillpondByteStore, MillpondEmbeddings
from millpond import AsyncEngine, Engine
from millpond.cache.vector_cache import VectorCache


class _Embeddings(EmbeddingsIntegrationTests):
    """The suite over ``options``."""

    options: dict[str, Any]

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MillpondEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return self.options


class TestMillpondEmbeddings(_Embeddings):
    """By the name of a model: the real MiniLM."""

    @pytest.fixture(autouse=True)
    def _options(self, minilm: str) -> None:
        self.options = {"model": minilm}


class TestMillpondEmbeddingsWithOptions(_Embeddings):
    """With prompts for each role and a Matryoshka width."""

    @pytest.fixture(autouse=True)
    def _options(self, prompted: str) -> None:
        self.options = {
            "model": prompted,
            "dimensions": 64,
            "hf_overrides": {"is_matryoshka": True},
            "query_prompt": "ask: ",
        }


class TestMillpondEmbeddingsOfAnEngine(_Embeddings):
    """Over an engine that the caller made."""

    @pytest.fixture(autouse=True)
    def _options(self, engine: Engine) -> None:
        self.options = {"engine": AsyncEngine(engine)}


class TestMillpondEmbeddingsWithACache(_Embeddings):
    """With millpond's own vector cache."""

    @pytest.fixture(autouse=True)
    def _options(self, minilm: str, tmp_path: Path) -> Iterator[None]:
        self.options = {"model": minilm, "cache": tmp_path / "vectors.cache"}
        yield
        MillpondEmbeddings(**self.options)._engine().close()


class TestCacheBackedEmbeddings(_Embeddings):
    """In LangChain's cache, over a MillpondByteStore; queries have a store of their own."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return CacheBackedEmbeddings

    @pytest.fixture(autouse=True)
    def _options(self, minilm: str, tmp_path: Path) -> Iterator[None]:
        def encoded(store: MillpondByteStore) -> BaseStore[str, list[float]]:
            return EncoderBackedStore(
                store, str, lambda row: np.array(row).tobytes(), lambda row: np.frombuffer(row).tolist()
            )

        with MillpondByteStore(tmp_path / "a") as documents, MillpondByteStore(tmp_path / "b") as queries:
            self.options = {
                "underlying_embeddings": MillpondEmbeddings(model=minilm),
                "document_embedding_store": encoded(documents),
                "query_embedding_store": encoded(queries),
            }
            yield


@pytest.fixture(params=["a new file", "a limit", "vectors beside"])
def byte_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MillpondByteStore]:
    path = tmp_path / "bytes.db"
    if request.param == "vectors beside":
        with VectorCache(path) as cache:
            cache.put(VectorCache.keys("model", ["a", "b"]), np.ones((2, 8)), tokens=[1, 2], truncated=[False, False])
    with MillpondByteStore(path, max_bytes=1 << 20 if request.param == "a limit" else None) as store:
        yield store


class TestMillpondByteStore(BaseStoreSyncTests[bytes]):
    """The suite of byte stores, synchronously."""

    @pytest.fixture
    def kv_store(self, byte_store: MillpondByteStore) -> MillpondByteStore:
        return byte_store

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"", b"\0\xff", b"value" * 1000


class TestMillpondByteStoreAsync(BaseStoreAsyncTests[bytes]):
    """The suite of byte stores, asynchronously."""

    @pytest.fixture
    async def kv_store(self, byte_store: MillpondByteStore) -> MillpondByteStore:  # type: ignore[override]
        return byte_store

    @pytest.fixture
    def three_values(self) -> tuple[bytes, bytes, bytes]:
        return b"", b"\0\xff", b"value" * 1000
