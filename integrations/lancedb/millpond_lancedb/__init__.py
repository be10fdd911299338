"""millpond's vectors in LanceDB. Importing it registers the embedding function "millpond"."""

from typing import TYPE_CHECKING, Any

from millpond_lancedb.embeddings import MillpondEmbeddings
from millpond_lancedb.reranker import MillpondReranker
from millpond_lancedb.url import sink_from_url

if TYPE_CHECKING:
    from millpond_lancedb.sink import LanceDBSink

__all__ = ["LanceDBSink", "MillpondEmbeddings", "MillpondReranker", "sink_from_url"]


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used."""
    if name != "LanceDBSink":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millpond_lancedb.sink import LanceDBSink

    return LanceDBSink
