"""millpond for LangChain."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_millpond.bge_embeddings import MillpondBgeEmbeddings
from langchain_millpond.cross_encoder import MillpondCrossEncoder
from langchain_millpond.embeddings import MillpondEmbeddings
from langchain_millpond.reranker import MillpondReranker
from langchain_millpond.retriever import MillpondColBERTRetriever
from langchain_millpond.sink_retriever import MillpondSinkRetriever

if TYPE_CHECKING:
    from langchain_millpond.sparse import MillpondSparseEmbeddings

__all__ = [
    "MillpondBgeEmbeddings",
    "MillpondColBERTRetriever",
    "MillpondCrossEncoder",
    "MillpondEmbeddings",
    "MillpondReranker",
    "MillpondSinkRetriever",
    "MillpondSparseEmbeddings",
]


def __getattr__(name: str) -> Any:
    if name == "MillpondSparseEmbeddings":
        # Its base class is langchain-qdrant's, which takes seconds to import.
        return import_module(f"{__name__}.sparse").MillpondSparseEmbeddings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
