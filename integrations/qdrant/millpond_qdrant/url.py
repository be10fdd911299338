"""The entry point ``qdrant`` of ``millpond.sinks``: what stands in a sink URL after ``qdrant+``."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond_qdrant.sink import QdrantSink


def sink_from_url(
    scheme: str, location: str, collection: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain"
) -> QdrantSink:
    """``qdrant+path:DIR#docs``, ``qdrant+memory:#docs``, ``qdrant+http://host:6333#docs`` or ``qdrant+https://...``."""
    match scheme:
        case "memory" if not location:
            place = ":memory:"
        case "path" if location:
            place = location
        case "http" | "https" if location.startswith("//"):
            place = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'qdrant+{scheme}:' does not name a Qdrant; write qdrant+path:DIR#docs, qdrant+memory:#docs "
                "or qdrant+http://host:6333#docs"
            )
    return QdrantSink(place, collection, dimensions=dimensions, payload=payload)
