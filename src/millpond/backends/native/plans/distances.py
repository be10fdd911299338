"""Distances: the terms that DeBERTa adds to the score of a query and a key, by the distance between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.checkpoints.stored_tensor import StoredTensor

# Columns of a unit of a weight, and how many distances at both ends of a table have the same column (disentangled.h).
_UNIT, _ENDS = 32, 32

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Rows of the table of embeddings by the distance of two tokens."""

    span: int  # the table has `2 span` rows; row `span` is distance 0
    buckets: bool  # near distances have a row each, far ones share logarithmic buckets
    farthest: int  # the distance at which the last bucket begins

    def rows(self, distance: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The row of each distance, query - key."""
        if self.buckets:
            distance = self._bucket(distance)
        return np.clip(distance + self.span, 0, 2 * self.span - 1)

    def _bucket(self, distance: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """DeBERTa v2's formula (in the code of arXiv:2006.03654, not in the text), in float32 as in training."""
        exact = self.span // 2
        far = np.maximum(np.abs(distance), exact).astype(np.float32) / np.float32(exact)
        reach = np.log(np.float32((self.farthest - 1) / exact))
        bucket = np.ceil(np.log(far) / reach * np.float32(exact - 1)).astype(np.intp) + exact
        return np.where(np.abs(distance) <= exact, distance, bucket * np.sign(distance))


@dataclass(frozen=True, kw_only=True, eq=False)
class DistanceColumns:
    """The columns of the kernels' tables, one for each row that differs, in the order of distances."""

    rows: npt.NDArray[np.intp]  # `[2, columns]`: the row that each column has, by key - query and by query - key
    columns: Ints  # `[2, 2 reach + 1]`: the column of each distance, by key - query and by query - key
    reach: int

    def rows_of(self, distance: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """The row of each distance, query - key."""
        column = self.columns[1][np.clip(distance, -self.reach, self.reach) + self.reach]
        rows: npt.NDArray[np.intp] = self.rows[1][column]
        return rows

    @classmethod
    def of(cls, distances: Distances) -> DistanceColumns:
        """Those of a table: the column of distance 0 begins a unit, since blocks of queries and keys do."""
        far = 1
        while (distances.rows(np.array([-far, far])) != [0, 2 * distances.span - 1]).any():  # all beyond are the same
            far *= 2
        reach = far + _ENDS
        by_distance = distances.rows(np.arange(-reach, reach + 1))
        sides = [_columns(by_distance[::-1]), _columns(by_distance)]
        width = max(len(rows) for rows, _ in sides)
        rows = [np.pad(rows, (0, width - len(rows)), mode="edge") for rows, _ in sides]
        return cls(rows=np.stack(rows), columns=np.stack([columns for _, columns in sides]), reach=reach)


def _columns(rows: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], Ints]:
    """The row of each column, whole units, and the column of each distance; ``rows`` are those of the distances."""
    column = np.concatenate([[0], np.cumsum(np.diff(rows) != 0)])
    before = -column[len(column) // 2] % _UNIT
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    different = np.pad(rows[starts], (before, 0), mode="edge")
    return np.pad(different, (0, -len(different) % _UNIT), mode="edge"), (column + before).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class DistanceTerms:
    """A layer's embeddings of distances, which are rows of its table as keys and as queries."""

    columns: DistanceColumns
    keys: StoredTensor | None  # `[rows, heads dim]`; None: no such term
    queries: StoredTensor | None  # `[rows, heads dim]`; None: no such term


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedTensor(StoredTensor):
    """Numbers that are computed when they are read; ``stored`` has their shape only."""

    numbers_of: Callable[[], Floats]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], numbers: Callable[[], Floats]) -> ComputedTensor:
        """A tensor of this shape."""
        return cls(name=name, dtype="float32", stored=np.broadcast_to(np.float32(0), shape), numbers_of=numbers)

    def float32(self) -> Floats:
        """The numbers."""
        return self.numbers_of()


def by_head(table: StoredTensor, rows: npt.NDArray[np.intp], heads: int) -> StoredTensor:
    """``[heads rows, dim]``: these rows of a table ``[n, heads dim]`` for one head below the other.

    Behind each head are columns of zeros, up to a whole unit.
    """
    dim = table.shape[1] // heads
    padding = -dim % _UNIT

    def numbers() -> Floats:
        by_head = table.float32()[rows].reshape(len(rows), heads, dim).swapaxes(0, 1).reshape(-1, dim)
        return np.pad(by_head, ((0, 0), (0, padding)))

    return ComputedTensor.of(table.name, (heads * len(rows), dim + padding), numbers)
