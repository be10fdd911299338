"""WriteBatch: rows to write together, and how they are split into requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record

FloatArray = npt.NDArray[np.float32]

# Bytes of one sparse entry in a request, at the most: the token id and the weight, in JSON.
_SPARSE_BYTES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteBatch:
    """Rows to write together, valid from construction: ids are distinct, every vector is finite and not zero.

    Attributes:
        records: ``n`` records.
        ids: ``n`` database ids, as :func:`~millpond.ingest.point_id` makes them.
        vectors: For each width, ``[n, width]`` float32, each row of length 1.
        sparse: Of a hybrid sink, ``n`` mappings of a token id to its weight.
    """

    records: Sequence[Record]
    ids: Sequence[str]
    vectors: Mapping[int, FloatArray]
    sparse: Sequence[Mapping[int, float]] | None = None

    def __post_init__(self) -> None:
        n = len(self.records)
        if len(self.ids) != n:
            raise InvalidRequestError(f"{len(self.ids)} ids for {n} records; give each record one")
        if self.sparse is not None and len(self.sparse) != n:
            raise InvalidRequestError(f"{len(self.sparse)} sparse vectors for {n} records; give each record one")
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

    def part(self, rows: slice) -> WriteBatch:
        """The rows of a slice, as a batch.

        Args:
            rows: Which rows.

        Returns:
            Views of the vectors, ``[rows, width]`` of each width, with their records and ids.
        """
        vectors = {width: values[rows] for width, values in self.vectors.items()}
        sparse = None if self.sparse is None else self.sparse[rows]
        part = object.__new__(WriteBatch)  # not tested again: the parts of a valid batch are valid
        values = {"records": self.records[rows], "ids": self.ids[rows], "vectors": vectors, "sparse": sparse}
        for name, value in values.items():
            object.__setattr__(part, name, value)
        return part


def storable(rows: FloatArray) -> npt.NDArray[np.bool_]:
    """``[n]``: which of ``rows [n, d]`` have a cosine, that is, are finite and not zero."""
    return np.logical_and(np.isfinite(rows).all(axis=1), rows.any(axis=1), dtype=np.bool_)


def record_bytes(record: Record) -> int:
    """Bytes of a record's id, text and metadata in a request, without the vectors."""
    metadata = len(json.dumps(dict(record.metadata), ensure_ascii=False).encode()) if record.metadata else 2
    return len(record.text.encode()) + len(record.id.encode()) + metadata


def request_sizes(batch: WriteBatch, float_bytes: int) -> list[int]:
    """Bytes of each row in a request, of which a float takes ``float_bytes``."""
    vector_bytes = float_bytes * sum(batch.vectors)
    sizes = [vector_bytes + record_bytes(record) for record in batch.records]
    if batch.sparse is None:
        return sizes
    return [size + _SPARSE_BYTES * len(row) for size, row in zip(sizes, batch.sparse, strict=True)]


def slices(sizes: Sequence[int], *, max_rows: int, max_bytes: int) -> Iterator[slice]:
    """Split consecutive rows into requests of at most ``max_rows`` rows and ``max_bytes`` bytes.

    A row larger than ``max_bytes`` gets a request for itself.
    """
    start, total = 0, 0
    for stop, size in enumerate(sizes):
        if stop > start and (stop - start == max_rows or total + size > max_bytes):
            yield slice(start, stop)
            start, total = stop, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
