"""RowMaker: the rows of a target, made of those that a source holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, content_hash, point_id
from millpond.ingest.sinks.batch import FloatArray, WriteBatch, storable
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.protocol import StoredRow
from millpond.ingest.sinks.stored_rows import stored_record

# A vector is copied bit by bit if its length is nearly 1: of half precision within 0.0005, of bfloat16 within 0.002.
_ABOUT_ONE = 2e-3


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that is not copied."""

    row_id: str
    reason: str
    record: Record | None = None  # None: its fields make no record


@dataclass(frozen=True, kw_only=True)
class _Row:
    id: str  # in the target
    source_id: str
    record: Record
    stored: StoredRow


class RowMaker:
    """Makes batches of rows that were read. A row keeps its id, if the target finds it by that.

    Args:
        source: The collection that is read.
        target: The collection that is written, prepared.
        sparse: Whether sparse vectors are copied.

    Attributes:
        moved: Ids in the target of the rows that have another one in the source.
    """

    def __init__(self, source: CollectionSink[Any], target: CollectionSink[Any], *, sparse: bool) -> None:
        self._source, self._target, self._sparse = source, target, sparse
        self._widths = target.open().dimensions
        self.moved: set[str] = set()

    def make(self, rows: Mapping[str, StoredRow]) -> tuple[WriteBatch | None, list[LeftOut]]:
        """The rows as a batch, with vectors ``[n, width]``.

        Args:
            rows: Rows of the source by their ids.

        Returns:
            The batch, ``None`` without a row in it, and the rows that are not copied.
        """
        left: list[LeftOut] = []
        made = [row for row_id, stored in rows.items() if (row := self._row(row_id, stored, left)) is not None]
        made = self._without_clashes(made, left)
        vectors = {width: _stacked(made, width) for width in self._widths}
        good = np.logical_and.reduce([storable(rows) for rows in vectors.values()])  # [n]
        for row, fine in zip(made, good, strict=True):
            if not fine:
                reason = "it has a vector that is zero or not finite"
                left.append(LeftOut(row_id=row.source_id, record=row.record, reason=reason))
        made = [row for row, fine in zip(made, good, strict=True) if fine]
        if not made:
            return None, left
        batch = WriteBatch(
            records=[row.record for row in made],
            ids=[row.id for row in made],
            vectors={width: _unit(rows[good]) for width, rows in vectors.items()},
            sparse=[row.stored.sparse or {} for row in made] if self._sparse else None,
        )
        return batch, left

    def _row(self, row_id: str, stored: StoredRow, left: list[LeftOut]) -> _Row | None:
        record: Record | None = None
        try:
            record = stored_record(row_id, stored)
            self._check(record, stored)
            return _Row(id=self._id(row_id, record), source_id=row_id, record=record, stored=stored)
        except InvalidRequestError as error:
            left.append(LeftOut(row_id=row_id, record=record, reason=str(error)))
            return None

    def _check(self, record: Record, stored: StoredRow) -> None:
        if stored.content_hash not in ("", content_hash(record.text)):
            raise InvalidRequestError(
                "its text is not the one that its vectors were made of, or cannot be read; ingest the record again"
            )
        if lacking := [width for width in self._widths if width not in stored.vectors]:
            raise InvalidRequestError(
                f"it has no vector of the widths {lacking}; ingest the record again, or copy the widths that it has"
            )
        self._target.check(record)

    def _id(self, row_id: str, record: Record) -> str:
        """The row's id in the target: its own, if the target finds it by that, else the one of the record."""
        of_record = point_id(record.id, record.chunk)
        if row_id == of_record or row_id in self._target.row_ids(record.id):
            return row_id
        return of_record

    def _without_clashes(self, made: Sequence[_Row], left: list[LeftOut]) -> list[_Row]:
        """The rows without those whose id in the target is that of another row of the source."""
        moved = [row for row in made if row.id != row.source_id]
        taken = set(self._source.fetch([row.id for row in moved])) if moved else set()
        clashing = set()
        for row in moved:
            if row.id in taken or row.id in self.moved:
                clashing.add(row.source_id)
                reason = f"another row of the source has the record id {row.record.id!r}, and the target keeps one"
                left.append(LeftOut(row_id=row.source_id, record=row.record, reason=reason))
            else:
                self.moved.add(row.id)
        return [row for row in made if row.source_id not in clashing]


def _stacked(rows: Sequence[_Row], width: int) -> FloatArray:
    """``[n, width]``, also of no rows."""
    return np.array([row.stored.vectors[width] for row in rows], dtype=np.float32).reshape(len(rows), width)


def _unit(rows: FloatArray) -> FloatArray:
    """The rows ``[n, width]``, those of another length than 1 divided by it."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)  # [n, 1]
    return np.where(np.abs(lengths - 1) > _ABOUT_ONE, rows / lengths, rows).astype(np.float32)
