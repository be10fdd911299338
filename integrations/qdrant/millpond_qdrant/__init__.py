"""millpond's vectors in Qdrant."""

from millpond_qdrant.index import QdrantIndex
from millpond_qdrant.sink import QdrantSink
from millpond_qdrant.url import sink_from_url

__all__ = ["QdrantIndex", "QdrantSink", "sink_from_url"]
