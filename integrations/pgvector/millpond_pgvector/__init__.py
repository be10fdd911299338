"""millpond's vectors in PostgreSQL with pgvector."""

from millpond_pgvector.sink import PgVectorSink, sink_from_url

__all__ = ["PgVectorSink", "sink_from_url"]
