"""millpond's vectors in LanceDB."""

from millpond_lancedb.sink import LanceDBSink
from millpond_lancedb.url import sink_from_url

__all__ = ["LanceDBSink", "sink_from_url"]
