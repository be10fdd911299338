"""millpond's late-interaction retriever for LlamaIndex."""

from llama_index.retrievers.millpond.base import MillpondColBERTRetriever

__all__ = ["MillpondColBERTRetriever"]
