"""millpond for LlamaIndex."""

from llama_index.embeddings.millpond.base import MillpondEmbedding
from llama_index.embeddings.millpond.transform import MillpondTransform

__all__ = ["MillpondEmbedding", "MillpondTransform"]
