"""Ingestion: records are embedded and written to a database, in bounded memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.errors import (
        JournalError,
        SinkError,
        SinkRejectedError,
        SinkTooLargeError,
        SinkUnavailableError,
        SourceNotFoundError,
    )
    from millpond.ingest.advice.advisor import Advice, advise
    from millpond.ingest.advice.judgements import read_judgements
    from millpond.ingest.batch import WriteBatch
    from millpond.ingest.chunking import Chunker, Chunking
    from millpond.ingest.collection import CollectionSink
    from millpond.ingest.delivery import RetryPolicy
    from millpond.ingest.manifest import CollectionManifest
    from millpond.ingest.payload import Payload
    from millpond.ingest.pipeline import ingest
    from millpond.ingest.record import Record, content_hash, point_id
    from millpond.ingest.report import IngestReport
    from millpond.ingest.search import Hit
    from millpond.ingest.sink import Sink, StoredRow
    from millpond.ingest.sources import RecordReader, Rejected, SkippedFiles, read
    from millpond.ingest.stop import StopRequest
    from millpond.ingest.trace import RunTrace
    from millpond.ingest.url import open_sink

_MODULES = {
    "Advice": "advice.advisor",
    "advise": "advice.advisor",
    "read_judgements": "advice.judgements",
    "Chunker": "chunking",
    "Chunking": "chunking",
    "CollectionManifest": "manifest",
    "CollectionSink": "collection",
    "Hit": "search",
    "IngestReport": "report",
    "JournalError": ".errors",
    "Payload": "payload",
    "Record": "record",
    "RecordReader": "sources",
    "Rejected": "sources",
    "RetryPolicy": "delivery",
    "RunTrace": "trace",
    "Sink": "sink",
    "SinkError": ".errors",
    "SinkRejectedError": ".errors",
    "SinkTooLargeError": ".errors",
    "SinkUnavailableError": ".errors",
    "SkippedFiles": "sources",
    "SourceNotFoundError": ".errors",
    "StopRequest": "stop",
    "StoredRow": "sink",
    "WriteBatch": "batch",
    "content_hash": "record",
    "ingest": "pipeline",
    "open_sink": "url",
    "point_id": "record",
    "read": "sources",
}

__all__ = [
    "Advice",
    "Chunker",
    "Chunking",
    "CollectionManifest",
    "CollectionSink",
    "Hit",
    "IngestReport",
    "JournalError",
    "Payload",
    "Record",
    "RecordReader",
    "Rejected",
    "RetryPolicy",
    "RunTrace",
    "Sink",
    "SinkError",
    "SinkRejectedError",
    "SinkTooLargeError",
    "SinkUnavailableError",
    "SkippedFiles",
    "SourceNotFoundError",
    "StopRequest",
    "StoredRow",
    "WriteBatch",
    "advise",
    "content_hash",
    "ingest",
    "open_sink",
    "point_id",
    "read",
    "read_judgements",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
