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
    from millpond.ingest.advice.judgements import Evaluation, evaluate, read_judgements
    from millpond.ingest.chunking import Chunker, Chunking
    from millpond.ingest.copying.copy import copy
    from millpond.ingest.copying.report import CopyReport
    from millpond.ingest.pipeline.delivery import RetryPolicy
    from millpond.ingest.pipeline.ingest import ingest
    from millpond.ingest.pipeline.source_items import StopRequest
    from millpond.ingest.record import Record, Rejected, content_hash, point_id
    from millpond.ingest.sinks.batch import WriteBatch
    from millpond.ingest.sinks.client import Connection, Fault
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.database import Database, database, open_sink
    from millpond.ingest.sinks.driver import CollectionDriver
    from millpond.ingest.sinks.fields import FieldLayout
    from millpond.ingest.sinks.manifest import CollectionManifest
    from millpond.ingest.sinks.origin import RowOrigin, trace
    from millpond.ingest.sinks.protocol import Sink, StoredRow
    from millpond.ingest.sinks.run_note import RunNote
    from millpond.ingest.sinks.search import Hit
    from millpond.ingest.sources.folder import SkippedFiles
    from millpond.ingest.sources.read import RecordReader, read
    from millpond.ingest.telemetry.report import IngestReport
    from millpond.ingest.telemetry.trace import RunTrace
    from millpond.support.filters import Range, check_filter, matches_filter

_MODULES = {
    ".errors": "JournalError SinkError SinkRejectedError SinkTooLargeError SinkUnavailableError SourceNotFoundError",
    "advice.advisor": "Advice advise",
    "advice.judgements": "Evaluation evaluate read_judgements",
    "chunking": "Chunker Chunking",
    "copying.copy": "copy",
    "copying.report": "CopyReport",
    "pipeline.delivery": "RetryPolicy",
    "pipeline.ingest": "ingest",
    "pipeline.source_items": "StopRequest",
    "record": "Record Rejected content_hash point_id",
    "sinks.batch": "WriteBatch",
    "sinks.client": "Connection Fault",
    "sinks.collection": "CollectionSink",
    "sinks.database": "Database database open_sink",
    "sinks.driver": "CollectionDriver",
    "sinks.fields": "FieldLayout",
    "sinks.manifest": "CollectionManifest",
    "sinks.origin": "RowOrigin trace",
    "sinks.protocol": "Sink StoredRow",
    "sinks.run_note": "RunNote",
    "sinks.search": "Hit",
    "sources.folder": "SkippedFiles",
    "sources.read": "RecordReader read",
    "telemetry.report": "IngestReport",
    "telemetry.trace": "RunTrace",
    ".support.filters": "Range check_filter matches_filter",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Advice",
    "Chunker",
    "Chunking",
    "CollectionDriver",
    "CollectionManifest",
    "CollectionSink",
    "Connection",
    "CopyReport",
    "Database",
    "Evaluation",
    "Fault",
    "FieldLayout",
    "Hit",
    "IngestReport",
    "JournalError",
    "Range",
    "Record",
    "RecordReader",
    "Rejected",
    "RetryPolicy",
    "RowOrigin",
    "RunNote",
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
    "check_filter",
    "content_hash",
    "copy",
    "database",
    "evaluate",
    "ingest",
    "matches_filter",
    "open_sink",
    "point_id",
    "read",
    "read_judgements",
    "trace",
]


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
