"""millpond's retrievers for LlamaIndex: over a late-interaction index, and over a collection of a database."""

from llama_index.retrievers.millpond.base import MillpondColBERTRetriever
from llama_index.retrievers.millpond.sink import MillpondSinkRetriever

__all__ = ["MillpondColBERTRetriever", "MillpondSinkRetriever"]
