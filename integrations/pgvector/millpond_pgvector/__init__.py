"""millpond's vectors in PostgreSQL with pgvector."""

from millpond_pgvector.sink import PgVectorSink
from millpond_pgvector.url import sink_from_url

__all__ = ["PgVectorSink", "sink_from_url"]
