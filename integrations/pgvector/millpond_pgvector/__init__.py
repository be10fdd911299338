"""millpond's vectors in PostgreSQL with pgvector."""

from typing import TYPE_CHECKING, Any

from millpond_pgvector.url import sink_from_url

if TYPE_CHECKING:
    from millpond_pgvector.sink import PgVectorSink

__all__ = ["PgVectorSink", "sink_from_url"]


def __getattr__(name: str) -> Any:
    """Import what needs the client only when it is used."""
    if name != "PgVectorSink":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from millpond_pgvector.sink import PgVectorSink

    return PgVectorSink
