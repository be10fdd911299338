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
    from millpond.ingest.chunking import Chunker, Chunking
    from millpond.ingest.pipeline.delivery import RetryPolicy
    from millpond.ingest.pipeline.ingest import ingest
    from millpond.ingest.pipeline.source_items import StopRequest
    from millpond.ingest.record import Record, content_hash, point_id
    from millpond.ingest.sinks.batch import WriteBatch
    from millpond.ingest.sinks.client import Connection, Fault
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import Database, database
    from millpond.ingest.sinks.driver import CollectionDriver
    from millpond.ingest.sinks.fields import FieldLayout
    from millpond.ingest.sinks.manifest import CollectionManifest
    from millpond.ingest.sinks.protocol import Sink, StoredRow
    from millpond.ingest.sinks.search import Hit
    from millpond.ingest.sinks.url import open_sink
    from millpond.ingest.sources.read import RecordReader, Rejected, SkippedFiles, read
    from millpond.ingest.telemetry.report import IngestReport
    from millpond.ingest.telemetry.trace import RunTrace

_MODULES = {
    "Advice": "advice.advisor",
    "advise": "advice.advisor",
    "read_judgements": "advice.judgements",
    "Chunker": "chunking",
    "Chunking": "chunking",
    "CollectionManifest": "sinks.manifest",
    "CollectionSink": "sinks.collection",
    "CollectionDriver": "sinks.driver",
    "Connection": "sinks.client",
    "Database": "sinks.database",
    "Fault": "sinks.client",
    "database": "sinks.database",
    "Hit": "sinks.search",
    "IngestReport": "telemetry.report",
    "JournalError": ".errors",
    "FieldLayout": "sinks.fields",
    "Record": "record",
    "RecordReader": "sources.read",
    "Rejected": "sources.read",
    "RetryPolicy": "pipeline.delivery",
    "RunTrace": "telemetry.trace",
    "Sink": "sinks.protocol",
    "SinkError": ".errors",
    "SinkRejectedError": ".errors",
    "SinkTooLargeError": ".errors",
    "SinkUnavailableError": ".errors",
    "SkippedFiles": "sources.read",
    "SourceNotFoundError": ".errors",
    "StopRequest": "pipeline.source_items",
    "StoredRow": "sinks.protocol",
    "WriteBatch": "sinks.batch",
    "content_hash": "record",
    "ingest": "pipeline.ingest",
    "open_sink": "sinks.url",
    "point_id": "record",
    "read": "sources.read",
}

__all__ = [
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
