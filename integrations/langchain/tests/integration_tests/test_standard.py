"""LangChain's own integration suite for embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

from langchain_millpond import MillpondEmbeddings


class TestMillpondEmbeddings(EmbeddingsIntegrationTests):
    """LangChain's tests with the real MiniLM."""

    @pytest.fixture(autouse=True)
    def _folder(self, minilm: str) -> None:
        self._minilm = minilm

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MillpondEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": self._minilm}
