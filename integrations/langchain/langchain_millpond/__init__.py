"""millpond for LangChain."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_millpond.byte_store import MillpondByteStore
from langchain_millpond.cross_encoder import MillpondCrossEncoder
from langchain_millpond.embeddings import MillpondEmbeddings
from langchain_millpond.reranker import MillpondReranker
from langchain_millpond.retriever import MillpondColBERTRetriever
from langchain_millpond.sink_retriever import MillpondSinkRetriever

if TYPE_CHECKING:
    from langchain_millpond.milvus_sparse import MillpondMilvusSparseEmbeddings
    from langchain_millpond.sparse import MillpondSparseEmbeddings

# Imported on first use: their base classes are those of langchain-qdrant and langchain-milvus, if installed, and these
# packages and their clients take seconds to import.
_HOMES = {"MillpondMilvusSparseEmbeddings": "milvus_sparse", "MillpondSparseEmbeddings": "sparse"}

__all__ = [
    "MillpondByteStore",
    "MillpondColBERTRetriever",
    "MillpondCrossEncoder",
    "MillpondEmbeddings",
    "MillpondMilvusSparseEmbeddings",
    "MillpondReranker",
    "MillpondSinkRetriever",
    "MillpondSparseEmbeddings",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
