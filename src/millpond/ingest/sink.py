"""Sink: where vectors go. A database package implements three methods; everything else is done for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record
from millpond.spec import ModelSpec

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows to write together, valid from construction: no id twice, every vector finite and longer than zero.

    Attributes:
        records: ``n`` records.
        ids: ``n`` database ids, as :func:`~millpond.ingest.point_id` makes them.
        vectors: For each width, ``[n, width]`` float32, each row of length 1.
    """

    records: Sequence[Record]
    ids: Sequence[str]
    vectors: Mapping[int, FloatArray]

    def __post_init__(self) -> None:
        n = len(self.records)
        if len(self.ids) != n:
            raise InvalidRequestError(f"{len(self.ids)} ids for {n} records; give each record one")
        if len(set(self.ids)) != n:
            raise InvalidRequestError("an id occurs twice in the batch; keep the last record of each id")
        if not self.vectors:
            raise InvalidRequestError("the batch holds no vectors; give at least one width")
        for width, rows in self.vectors.items():
            if rows.shape != (n, width):
                raise InvalidRequestError(f"the vectors of width {width} have shape {rows.shape}, not {(n, width)}")
            if not (good := storable(rows)).all():
                bad = self.records[int(np.argmin(good))].id
                raise InvalidRequestError(f"record {bad!r}: its {width} floats are not finite, or all zero")

    def __len__(self) -> int:
        return len(self.records)


class Sink(Protocol):
    """What :func:`~millpond.ingest.ingest` asks of a database.

    Two more attributes are read where a sink has them: ``dimensions``, the widths it stores (without it the one that
    ``embed`` gives), and :class:`Checks`. All calls of one run come from one thread at a time.
    """

    def prepare(self, spec: ModelSpec) -> None:
        """Open the collection, or create it, before anything is read.

        Raises:
            FingerprintMismatchError: The collection was built by another model, or not by millpond.
        """

    def write(self, batch: Batch) -> None:
        """Store every row, replacing those whose id exists, and return once the database has acknowledged them."""

    def close(self) -> None:
        """Release what the sink opened itself."""


@runtime_checkable
class Checks(Protocol):
    """A sink that knows, before it is embedded, that a record can never be stored."""

    def check(self, record: Record) -> None:
        """Raise :class:`~millpond.errors.InvalidRequestError` for a record that cannot be stored."""


def storable(rows: FloatArray) -> npt.NDArray[np.bool_]:
    """``[n]``: which ``rows [n, d]`` have a direction, that is, are finite and not zero."""
    return np.logical_and(np.isfinite(rows).all(axis=1), rows.any(axis=1), dtype=np.bool_)


def check_widths(dimensions: Sequence[int] | None) -> tuple[int, ...] | None:
    """The widths of a sink, ascending, each once; ``None`` stands for the one that ``embed`` gives."""
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


def record_bytes(record: Record) -> int:
    """Bytes of a record's text and metadata on the wire, before the vectors."""
    metadata = len(json.dumps(dict(record.metadata), ensure_ascii=False).encode()) if record.metadata else 2
    return len(record.text.encode()) + len(record.id.encode()) + metadata


def slices(sizes: Sequence[int], *, max_rows: int, max_bytes: int) -> Iterator[slice]:
    """Consecutive runs of rows, each of at most ``max_rows`` and, unless it is a single row, ``max_bytes``.

    Args:
        sizes: ``n`` sizes of the rows, in bytes.
        max_rows: Most rows of one request.
        max_bytes: Most bytes of one request.
    """
    start, total = 0, 0
    for stop, size in enumerate(sizes):
        if stop > start and (stop - start == max_rows or total + size > max_bytes):
            yield slice(start, stop)
            start, total = stop, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
