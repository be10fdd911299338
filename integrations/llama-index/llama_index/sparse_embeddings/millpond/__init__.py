"""millpond's sparse embeddings for LlamaIndex."""

from llama_index.sparse_embeddings.millpond.base import MillpondSparseEmbedding

__all__ = ["MillpondSparseEmbedding"]
