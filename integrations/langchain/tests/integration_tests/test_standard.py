"""LangChain's own suites: embeddings in every way they are made, and the byte store in every kind of file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

from langchain_millpond import MillpondEmbeddings
from millpond import AsyncEngine, Engine

pytestmark = pytest.mark.contract


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
