"""millpond for LangChain."""

from langchain_millpond.embeddings import MillpondEmbeddings

__all__ = ["MillpondEmbeddings"]
