"""millpond's vectors in Milvus."""

from millpond_milvus.index import MilvusIndex
from millpond_milvus.sink import MilvusSink
from millpond_milvus.url import sink_from_url

__all__ = ["MilvusIndex", "MilvusSink", "sink_from_url"]
