"""millpond's vectors in Qdrant."""

from millpond_qdrant.sink import QdrantSink
from millpond_qdrant.url import sink_from_url

__all__ = ["QdrantSink", "sink_from_url"]
