"""MillpondSparseEmbeddingFunction: the sparse twin of Chroma's embedding function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chromadb.api.types import Documents, SparseEmbeddingFunction, SparseVectors
from chromadb.base_types import SparseVector
from chromadb.utils.embedding_functions import register_sparse_embedding_function

from millpond.compat.composed import SparseEmbedder
from millpond.tasks import Role
from millpond_chroma.model_function import ModelFunction


@register_sparse_embedding_function
class MillpondSparseEmbeddingFunction(ModelFunction[SparseEmbedder], SparseEmbeddingFunction[Documents]):
    """Weighs the vocabulary for documents and queries, by a SPLADE checkpoint or BGE-M3 that runs in this process.

    For a ``SparseVectorIndexConfig`` of a schema, which Chroma's server in the cloud has, and a folder has not.

    Args:
        model: Hub id or local folder.
        identity: What Chroma stored of the model; leave it out.
        **options: The fields of :class:`millpond.compat.composed.SparseEmbedder` and the classes that it derives from.

    Raises:
        MillpondError: The model cannot be loaded, or is not that of the collection.
        ValueError: An option that is unknown or not valid.
    """

    source = SparseEmbedder

    def __init__(self, model: str | None = None, *, identity: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._load(model, identity, options)

    def __call__(self, input: Documents) -> SparseVectors:
        """The weights of documents.

        Args:
            input: Texts.

        Returns:
            For each text its weights, by ascending token id.
        """
        return self._weights(input, "document")

    def embed_query(self, input: Documents) -> SparseVectors:
        """The weights of queries.

        Args:
            input: Texts.

        Returns:
            For each text its weights, by ascending token id.
        """
        return self._weights(input, "query")

    @staticmethod
    def name() -> str:
        """The name in Chroma's registry.

        Returns:
            ``"millpond_sparse"``.
        """
        return "millpond_sparse"

    def _weights(self, input: Documents, role: Role) -> SparseVectors:
        rows = self._source.embed(list(input), role)
        return [SparseVector(indices=list(row), values=list(row.values())) for row in rows]
