"""The rows of a collection, read back: with their vectors, or as the records that they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest.chunking import CHUNK_KEYS
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.protocol import ReadsContent, StoredRow

if TYPE_CHECKING:
    from millpond.ingest.sinks.collection import CollectionSink

# Rows in memory at a time, with their texts.
_PAGE_ROWS = 512


def stored_rows(
    sink: ReadsContent, *, row_ids: Iterable[str] | None = None, widths: Sequence[int] = (), page: int = _PAGE_ROWS
) -> Iterator[Mapping[str, StoredRow]]:
    """Rows by their ids, a page at a time, with texts and metadata; what is deleted meanwhile is left out.

    Args:
        sink: The sink of the collection.
        row_ids: The rows to read; by default all, in the database's order.
        widths: The widths of the vectors to read; empty for none.
        page: Most rows at a time.

    Returns:
        An iterator of pages.

    Raises:
        SinkError: The database cannot list its rows, or does not answer.
    """
    ids = iter((row_id for row_id, _ in sink.scan()) if row_ids is None else row_ids)
    while part := list(islice(ids, page)):
        yield sink.read_rows(part, widths=widths)


def stored_record(row_id: str, row: StoredRow) -> Record:
    """The record, or the chunk of one, that a row was written from: writing it again gives the same row id.

    Args:
        row_id: The row's id.
        row: The row, with its text and metadata.

    Returns:
        The record. That of a row which a framework wrote has the row's id.
    """
    metadata = dict(row.metadata or {})
    number = metadata.get(CHUNK_KEYS[0])
    chunk = number if type(number) is int and number > 0 and point_id(row.record_id, number) == row_id else 0
    return Record(row.record_id, row.text or "", metadata, chunk=chunk)


def stored_records(sink: CollectionSink[Any]) -> Iterator[Record]:
    """The records and chunks of a whole collection, as a source for :func:`~millpond.ingest.ingest`.

    Args:
        sink: The sink of the collection.

    Returns:
        An iterator of records, in the database's order.

    Raises:
        SinkError: The database cannot list its rows, or does not answer.
    """
    for page in stored_rows(sink):
        for row_id, row in page.items():
            yield stored_record(row_id, row)


def rows_manifest(sink: CollectionSink[Any], *, verb: str) -> CollectionManifest:
    """The manifest of a collection whose rows are read.

    Args:
        sink: A sink of it.
        verb: What is done with the rows, for error messages: ``copied``.

    Returns:
        The manifest; the collection is open then.

    Raises:
        InvalidRequestError: There is no such collection, or it holds token vectors.
        FingerprintMismatchError: Millpond did not make it.
    """
    manifest = sink.describe().manifest
    if manifest is None:
        raise FingerprintMismatchError(
            f"collection {sink.collection!r} was not made by millpond and names no model, so its rows are not {verb}; "
            "embed its texts by millpond ingest, or use the database's own tools"
        )
    if not isinstance(manifest, CollectionManifest):
        raise InvalidRequestError(
            f"collection {sink.collection!r} holds token vectors for late interaction, which are not {verb}; build "
            "another index of its texts by millpond index build"
        )
    return sink.open()
