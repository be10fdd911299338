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
    from millpond.ingest.collection_client import Connection, Fault
    from millpond.ingest.databases import Database, database
    from millpond.ingest.delivery import RetryPolicy
    from millpond.ingest.driver import CollectionDriver
    from millpond.ingest.manifest import CollectionManifest
    from millpond.ingest.payload import FieldLayout
    from millpond.ingest.pipeline import ingest
    from millpond.ingest.record import NAMESPACE, Record, content_hash, point_id
    from millpond.ingest.report import IngestReport, Verification
    from millpond.ingest.search import Hit
    from millpond.ingest.sink import Sink, StoredRow
    from millpond.ingest.sources import Rejected, SkippedFiles, read
    from millpond.ingest.stop import StopRequest
    from millpond.ingest.trace import RunTrace
    from millpond.ingest.url import open_sink

_MODULES = {
    "Advice": "advice.advisor",
    "advise": "advice.advisor",
    "read_judgements": "advice.judgements",
    "NAMESPACE": "record",
    "Chunker": "chunking",
    "Chunking": "chunking",
    "CollectionManifest": "manifest",
    "CollectionSink": "collection",
    "CollectionDriver": "driver",
    "Connection": "collection_client",
    "Database": "databases",
    "Fault": "collection_client",
    "database": "databases",
    "Hit": "search",
    "IngestReport": "report",
    "JournalError": ".errors",
    "FieldLayout": "payload",
    "Record": "record",
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
    "Verification": "report",
    "WriteBatch": "batch",
    "content_hash": "record",
    "ingest": "pipeline",
    "open_sink": "url",
    "point_id": "record",
    "read": "sources",
}

__all__ = [
    "NAMESPACE",
    "Advice",
    "Chunker",
    "Chunking",
    "CollectionDriver",
    "CollectionManifest",
    "CollectionSink",
    "Connection",
    "Database",
    "Fault",
    "FieldLayout",
    "Hit",
    "IngestReport",
    "JournalError",
    "Record",
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
    "Verification",
    "WriteBatch",
    "advise",
    "content_hash",
    "database",
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
