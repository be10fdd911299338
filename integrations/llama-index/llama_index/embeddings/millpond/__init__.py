"""millpond for LlamaIndex."""

from llama_index.embeddings.millpond.base import MillpondEmbedding

__all__ = ["MillpondEmbedding"]
