"""LangChain's own unit suite for embeddings."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_tests.unit_tests import EmbeddingsUnitTests

from langchain_millpond import MillpondEmbeddings


class TestMillpondEmbeddings(EmbeddingsUnitTests):
    """Built from a name; nothing is loaded."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return MillpondEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "sentence-transformers/all-MiniLM-L6-v2"}
