"""Projection: token rows cut to fewer columns, by Matryoshka where the checkpoint is trained for it, else by PCA."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.support.cached_property import cached_property
from millpond.values.spec import ModelSpec
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

# Rows for each column, below which the user is warned.
_ROWS_PER_COLUMN = 10
# Rows multiplied at a time, as float64.
_STEP = 1 << 12
# Weight of the columns themselves, for directions in which the sample has nothing.
_RIDGE = 1e-9


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of token rows to a smaller width. An index stores ``matrix``, which is all there is."""

    matrix: FloatArray  # float32 `[d, width]` with orthonormal columns

    def __post_init__(self) -> None:
        matrix = self.matrix
        if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not 1 <= matrix.shape[1] <= matrix.shape[0]:
            raise ValueError(f"matrix has shape {np.shape(matrix)}; it must be [d, width], 1 <= width <= d")
        if matrix.dtype != np.float32 or not np.isfinite(matrix).all():
            raise ValueError(f"matrix is {matrix.dtype}; it must be float32, and finite")

    @classmethod
    def matryoshka(cls, native: int, width: int) -> Projection:
        """The first ``width`` of ``native`` columns."""
        return cls(np.eye(native, width, dtype=np.float32))

    @classmethod
    def fit(cls, rows: FloatArray, width: int) -> Projection:
        """The principal directions of token rows ``[n, d]``: those in which their squares add up to the most.

        The rows are not centred, since MaxSim compares them by the dot product. Each direction's largest component is
        positive.
        """
        native = rows.shape[1]
        if len(rows) < _ROWS_PER_COLUMN * width:
            logger.warning(
                "a projection to %d columns is fitted on %d token rows; texts unlike these lose more of their meaning: "
                "add at least %d rows at first, or keep the full width of %d",
                width,
                len(rows),
                _ROWS_PER_COLUMN * width,
                native,
            )
        squares = np.zeros((native, native))  # [d, d] sum of the rows' outer products
        for start in range(0, len(rows), _STEP):
            step = rows[start : start + _STEP].astype(np.float64)
            squares += step.T @ step
        # Directions in which the sample has nothing are chosen by this alone: the first columns come first.
        squares[np.diag_indices(native)] += _RIDGE * (np.trace(squares) / native or 1) * np.linspace(2, 1, native)
        directions = np.linalg.eigh(squares)[1][:, ::-1][:, :width]  # [d, width], ascending before
        largest = np.abs(directions).argmax(axis=0)
        directions = directions * np.where(directions[largest, np.arange(width)] < 0, -1, 1)
        return cls(np.ascontiguousarray(directions, dtype=np.float32))

    @property
    def width(self) -> int:
        """Columns of the result."""
        return int(self.matrix.shape[1])

    @property
    def native(self) -> int:
        """Columns of the rows that it is applied to."""
        return int(self.matrix.shape[0])

    @cached_property
    def cuts(self) -> bool:
        """Whether it keeps the first columns as they are, as Matryoshka does."""
        return np.array_equal(self.matrix, np.eye(*self.matrix.shape, dtype=np.float32))

    def apply(self, rows: Ragged) -> Ragged:
        """Project rows ``[n, d]`` to float32 ``[n, width]`` of length 1; a zero row stays zero."""
        flat = rows.flat.astype(np.float32, copy=False)
        if flat.shape[1] != self.native:
            raise InvalidRequestError(
                f"the rows have {flat.shape[1]} columns, and the projection was made for {self.native}; "
                "use the model that it was fitted with"
            )
        projected = matryoshka.cut(flat if self.cuts else flat @ self.matrix, self.width, normalize=True)
        return Ragged(flat=projected, offsets=rows.offsets)


def is_trained(spec: ModelSpec, width: int) -> bool:
    """Whether a checkpoint's token rows may be cut to ``width`` as they are: Matryoshka, or its own width."""
    try:
        matryoshka.check(
            width,
            native=spec.hidden_size,
            trained=spec.matryoshka,
            declared=spec.matryoshka_dimensions,
            model=spec.name,
            smallest=spec.matryoshka_smallest,
        )
    except InvalidDimensionsError:
        return False
    return True
