"""The entry point ``qdrant`` of ``millpond.sinks``: opens the sink of a URL ``qdrant+SCHEME:LOCATION#COLLECTION``."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond.ingest.location import is_address, url_of
from millpond_qdrant.sink import QdrantSink


def sink_from_url(
    scheme: str, location: str, collection: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain"
) -> QdrantSink:
    """Open ``qdrant+path:DIR#docs``, ``qdrant+memory:#docs``, ``qdrant+http://host:6333#docs`` or ``qdrant+https://...``."""
    match scheme:
        case "memory" if not location:
            address = ":memory:"
        case "path" if location:
            if is_address(location):
                folder = "./NAME" if "@" in location else f"./{location}"  # what is before an @ might be a password
                raise InvalidRequestError(
                    "'qdrant+path:' takes a folder, and this looks like the address of a server; write "
                    f"qdrant+{url_of(location, port=6333)}#{collection} for it, or qdrant+path:{folder}#{collection} "
                    "for a folder of this name"
                )
            address = location
        case "http" | "https" if location.startswith("//"):
            address = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'qdrant+{scheme}:' does not name a Qdrant; write qdrant+path:DIR#docs, qdrant+memory:#docs "
                "or qdrant+http://host:6333#docs"
            )
    return QdrantSink(address, collection, dimensions=dimensions, payload=payload)
