"""millpond for LangChain."""

from langchain_millpond.cross_encoder import MillpondCrossEncoder
from langchain_millpond.embeddings import MillpondEmbeddings
from langchain_millpond.reranker import MillpondReranker
from langchain_millpond.retriever import MillpondColBERTRetriever
from langchain_millpond.sink_retriever import MillpondSinkRetriever

__all__ = [
    "MillpondColBERTRetriever",
    "MillpondCrossEncoder",
    "MillpondEmbeddings",
    "MillpondReranker",
    "MillpondSinkRetriever",
]
