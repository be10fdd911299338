"""millpond's vectors in LanceDB."""

from millpond_lancedb.sink import LanceDBSink, sink_from_url

__all__ = ["LanceDBSink", "sink_from_url"]
