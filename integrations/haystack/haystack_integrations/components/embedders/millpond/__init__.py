"""millpond's embedders for Haystack."""

from haystack_integrations.components.embedders.millpond.dense import MillpondDocumentEmbedder, MillpondTextEmbedder
from haystack_integrations.components.embedders.millpond.sparse import (
    MillpondSparseDocumentEmbedder,
    MillpondSparseTextEmbedder,
)

__all__ = [
    "MillpondDocumentEmbedder",
    "MillpondSparseDocumentEmbedder",
    "MillpondSparseTextEmbedder",
    "MillpondTextEmbedder",
]
