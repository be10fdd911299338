"""The entry point ``milvus`` of ``millpond.sinks``: what stands in a sink URL after ``milvus+``."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import InvalidRequestError
from millpond_milvus.sink import MilvusSink


def sink_from_url(
    scheme: str, location: str, collection: str, *, dimensions: Sequence[int] | None = None, payload: str = "plain"
) -> MilvusSink:
    """``milvus+file:X.db#docs``, ``milvus+http://host:19530#docs`` or ``milvus+https://...``."""
    match scheme:
        case "file" if location:
            place = location
        case "http" | "https" if location.startswith("//"):
            place = f"{scheme}:{location}"
        case _:
            raise InvalidRequestError(
                f"'milvus+{scheme}:' does not name a Milvus; write milvus+file:X.db#docs "
                "or milvus+http://host:19530#docs"
            )
    return MilvusSink(place, collection, dimensions=dimensions, payload=payload)
