"""The entry point ``qdrant`` of ``millpond.sinks``: opens the sink of a URL ``qdrant+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond_qdrant.sink import QdrantSink


def sink_from_url(
    scheme: str, location: str, collection: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain"
) -> QdrantSink:
    """Open ``qdrant+path:DIR#docs``, ``qdrant+memory:#docs``, ``qdrant+http://host:6333#docs`` or ``qdrant+https://...``."""
    match scheme:
        case "memory" if not location:
            address = ":memory:"
        case "path" if location:
            address = location
        case "http" | "https" if location.startswith("//"):
            address = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'qdrant+{scheme}:' does not name a Qdrant; write qdrant+path:DIR#docs, qdrant+memory:#docs "
                "or qdrant+http://host:6333#docs"
            )
    return QdrantSink(address, collection, dimensions=dimensions, payload=payload)
