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
    from millpond.ingest.pipeline.stop import StopRequest
    from millpond.ingest.record import NAMESPACE, Record, content_hash, point_id
    from millpond.ingest.sinks.batch import WriteBatch
    from millpond.ingest.sinks.collection import CollectionSink
    from millpond.ingest.sinks.manifest import CollectionManifest
    from millpond.ingest.sinks.payload import FieldLayout
    from millpond.ingest.sinks.protocol import Sink, StoredRow
    from millpond.ingest.sinks.search import Hit
    from millpond.ingest.sinks.url import open_sink
    from millpond.ingest.sources.read import Rejected, SkippedFiles, read
    from millpond.ingest.telemetry.report import IngestReport, Verification
    from millpond.ingest.telemetry.trace import RunTrace

_MODULES = {
    "Advice": "advice.advisor",
    "advise": "advice.advisor",
    "read_judgements": "advice.judgements",
    "NAMESPACE": "record",
    "Chunker": "chunking",
    "Chunking": "chunking",
    "CollectionManifest": "sinks.manifest",
    "CollectionSink": "sinks.collection",
    "Hit": "sinks.search",
    "IngestReport": "telemetry.report",
    "JournalError": ".errors",
    "FieldLayout": "sinks.payload",
    "Record": "record",
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
    "StopRequest": "pipeline.stop",
    "StoredRow": "sinks.protocol",
    "Verification": "telemetry.report",
    "WriteBatch": "sinks.batch",
    "content_hash": "record",
    "ingest": "pipeline.ingest",
    "open_sink": "sinks.url",
    "point_id": "record",
    "read": "sources.read",
}

__all__ = [
    "NAMESPACE",
    "Advice",
    "Chunker",
    "Chunking",
    "CollectionManifest",
    "CollectionSink",
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
