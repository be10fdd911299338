"""repair: rows that are off, embedded again by the collection's own model and written in their place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millpond.audit.report import AuditReport
from millpond.audit.rows import batches
from millpond.errors import InvalidRequestError
from millpond.ingest.pipeline.delivery import RetryingWriter, RetryPolicy
from millpond.ingest.pipeline.embedder import PlannedRecord, RecordEmbedder, UnembeddedRecord
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.stored_rows import stored_record, stored_rows
from millpond.support.blank import is_blank

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

_ROWS = 256  # that are embedded and written at a time


def repair(sink: CollectionSink[Any], engine: Engine, report: AuditReport) -> AuditReport:
    """Embed the rows that are off again, from their texts, and write them: each replaces the one of its id.

    Args:
        sink: A sink of the collection, which millpond made.
        engine: The collection's own model.
        report: What an audit found.

    Returns:
        The report, with how many rows were fixed, and why others were not.

    Raises:
        FingerprintMismatchError: Another model filled the collection, or millpond did not make it.
        InvalidRequestError: It has sparse vectors, which another model may have made.
        SinkError: The database refuses or does not answer.
    """
    manifest = sink.open()
    if manifest.sparse is not None:
        raise InvalidRequestError(
            f"collection {sink.collection!r} has sparse vectors too; ingest its source again, which writes both"
        )
    sink.prepare(engine.spec, chunked=manifest.chunked)
    requests = RetryingWriter(
        RetryPolicy(), threading.Event(), lambda error, wait: logger.warning("%s; again in %.1f s", error, wait)
    )
    embedder = RecordEmbedder(engine, manifest.dimensions)
    fixed, unfixed = 0, {}
    for ids in batches((finding.id for finding in report.findings), _ROWS):
        records: list[Record] = []
        for row_id, record in _records(sink, ids):
            if record is None or is_blank(record.text):
                unfixed[row_id] = "it has no text; delete it, or write it again from its source"
            elif point_id(record.id, record.chunk) != row_id:
                unfixed[row_id] = "millpond did not write it; let the framework that did write it again"
            else:
                records.append(record)
        planned = [PlannedRecord(record, [record]) for record in records]
        for done in embedder.complete(embedder.submit(planned)) if planned else ():
            if isinstance(done, UnembeddedRecord):
                unfixed[point_id(done.record.record.id, done.record.record.chunk)] = done.reason
                continue
            refused = dict(requests.write(sink.write, done.batch))
            fixed += len(done.batch) - len(refused)
            unfixed |= {done.batch.ids[place]: reason for place, reason in refused.items()}
    return replace(report, fixed=fixed, unfixed=tuple(unfixed.items()))


def _records(sink: CollectionSink[Any], ids: Sequence[str]) -> Iterator[tuple[str, Record | None]]:
    """The records of rows; ``None`` for a row that is not there any more, or that cannot be read."""
    missing = dict.fromkeys(ids)
    for page in stored_rows(sink, row_ids=ids):
        for row_id, row in page.items():
            missing.pop(row_id, None)
            yield row_id, stored_record(row_id, row)
    yield from ((row_id, None) for row_id in missing)
