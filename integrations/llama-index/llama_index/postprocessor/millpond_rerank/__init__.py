"""millpond's reranker for LlamaIndex."""

from llama_index.postprocessor.millpond_rerank.base import MillpondRerank

__all__ = ["MillpondRerank"]
