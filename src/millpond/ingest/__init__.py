"""Ingestion: records in, vectors in a database, in bounded memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.errors import SinkError, SourceNotFoundError
    from millpond.ingest.manifest import CollectionMark
    from millpond.ingest.payload import Payload
    from millpond.ingest.pipeline import ingest
    from millpond.ingest.record import NAMESPACE, Record, content_hash, point_id
    from millpond.ingest.report import IngestReport
    from millpond.ingest.search import Hit
    from millpond.ingest.sink import Batch, Sink
    from millpond.ingest.sources import Rejected, read
    from millpond.ingest.url import open_sink

_HOMES = {
    "NAMESPACE": "record",
    "Batch": "sink",
    "CollectionMark": "manifest",
    "Hit": "search",
    "IngestReport": "report",
    "Payload": "payload",
    "Record": "record",
    "Rejected": "sources",
    "Sink": "sink",
    "SinkError": ".errors",
    "SourceNotFoundError": ".errors",
    "content_hash": "record",
    "ingest": "pipeline",
    "open_sink": "url",
    "point_id": "record",
    "read": "sources",
}

__all__ = [
    "NAMESPACE",
    "Batch",
    "CollectionMark",
    "Hit",
    "IngestReport",
    "Payload",
    "Record",
    "Rejected",
    "Sink",
    "SinkError",
    "SourceNotFoundError",
    "content_hash",
    "ingest",
    "open_sink",
    "point_id",
    "read",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
