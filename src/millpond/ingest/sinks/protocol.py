"""Sink: where ingest writes vectors. A database usually derives its sink from CollectionSink, which has the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record
from millpond.ingest.sinks.batch import FloatArray, WriteBatch
from millpond.values.spec import ModelSpec


class Sink(Protocol):
    """The methods that :func:`~millpond.ingest.ingest` calls.

    More attributes are optional: ``dimensions``, the widths to store (by default the width that ``embed`` returns),
    ``hybrid``, whether it stores sparse vectors too, ``target``, a str by which a journal tells the collection from
    others (by default the name of the class: two collections of it then need a journal each), and the methods of
    :class:`Checks`, :class:`Deletes` and :class:`Reads`. One run calls from one thread at a time.
    """

    def prepare(self, spec: ModelSpec) -> None:
        """Open the collection, or create it, before anything is read.

        Args:
            spec: The model of the vectors.

        Raises:
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
        """

    def write(self, batch: WriteBatch) -> None:
        """Store every row, replacing those whose id exists, and return once the database has acknowledged them.

        Args:
            batch: The rows, with their vectors.

        Raises:
            SinkUnavailableError: The run tries again, for a time.
            SinkTooLargeError: The run tries again with half of the rows at a time.
            SinkRejectedError: The run finds the rows that are refused, leaves them out and writes the others.
            SinkError: Any other stops the run.
        """

    def close(self) -> None:
        """Release the resources that the sink opened itself."""


@runtime_checkable
class Checks(Protocol):
    """A sink that can refuse a record before it is embedded."""

    def check(self, record: Record) -> None:
        """Raise :class:`~millpond.errors.InvalidRequestError` for a record that cannot be stored."""


@runtime_checkable
class Deletes(Protocol):
    """A sink that can delete records: those that an earlier run wrote, and whose text is blank now."""

    def delete(self, ids: Sequence[str], /) -> None:
        """Delete records by their ids; those that do not exist are ignored."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRow:
    """A row as the database holds it.

    Attributes:
        record_id: The record's id.
        content_hash: The hash of its text, as it is stored; empty in a row that a framework wrote.
        vectors: For each width asked for that the row has, ``[width]`` float32.
        text: Its text as users see it; ``None`` if it was not asked for.
        metadata: Its metadata as users see it; ``None`` if it was not asked for.
        sparse: Its sparse vector, as token ids and weights, of a collection that has such; ``None`` if no vector was
            asked for.
    """

    record_id: str
    content_hash: str
    vectors: Mapping[int, FloatArray] = field(default_factory=dict)
    text: str | None = None
    metadata: Mapping[str, Any] | None = None
    sparse: Mapping[int, float] | None = None


@runtime_checkable
class Reads(Protocol):
    """A sink whose rows can be read back: to verify a run, and to delete what its source no longer has."""

    def count(self) -> int:
        """How many rows the collection holds."""

    def fetch(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """Those of these rows that exist, with their vectors of some widths."""

    def scan(self) -> Iterator[tuple[str, str]]:
        """The row id and the record id of every row, in any order."""

    def delete_rows(self, row_ids: Sequence[str]) -> None:
        """Delete rows by their own ids; those that do not exist are ignored."""


@runtime_checkable
class ReadsContent(Reads, Protocol):
    """A sink whose rows can be compared with their records."""

    def read_rows(self, row_ids: Sequence[str], *, widths: Sequence[int] = ()) -> dict[str, StoredRow]:
        """As ``fetch``, with the texts and the metadata."""


@runtime_checkable
class NotesRun(Sink, Protocol):
    """A sink whose collection keeps the id of the run that changed it last, so that a restored copy is noticed."""

    def last_run(self) -> str:
        """The id that :meth:`note_run` stored; empty if there is none."""

    def note_run(self, run: str) -> None:
        """Store the id of a run.

        Raises:
            SinkError: The collection cannot keep one.
        """


@runtime_checkable
class ChunkedRows(Reads, Protocol):
    """A sink that can find the rows of records which were cut into more chunks before."""

    def chunks_from(self, first: Mapping[str, int]) -> list[str]:
        """Row ids of these records' chunks from a number on, the last ones first."""


def check_widths(dimensions: Sequence[int] | None) -> tuple[int, ...] | None:
    """The widths of a sink, ascending and distinct; ``None`` stands for the width that ``embed`` returns."""
    if dimensions is None:
        return None
    if isinstance(dimensions, str) or not isinstance(dimensions, Sequence) or not dimensions:
        raise InvalidRequestError(f"dimensions={dimensions!r} must be a list of widths like [128, 768], or None")
    for width in dimensions:
        if isinstance(width, bool) or not isinstance(width, int | np.integer) or width < 1:
            raise InvalidRequestError(f"dimensions={list(dimensions)!r}: {width!r} is no width; pass ints from 1")
    return tuple(sorted({int(width) for width in dimensions}))


def vector_name(width: int) -> str:
    """The name of the vector, or field, of a width."""
    return f"d{width}"
