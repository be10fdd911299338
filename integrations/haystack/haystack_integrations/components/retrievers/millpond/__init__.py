"""millpond's retriever for Haystack."""

from haystack_integrations.components.retrievers.millpond.index_retriever import MillpondIndexRetriever

__all__ = ["MillpondIndexRetriever"]
