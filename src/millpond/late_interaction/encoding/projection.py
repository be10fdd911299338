"""Projection: token rows cut to fewer columns, by Matryoshka where the checkpoint is trained for it, else by PCA."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidDimensionsError, InvalidRequestError
from millpond.support.cached_property import cached_property
from millpond.values.spec import ModelSpec
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

# Most rows that a projection is fitted on: more change nothing in the third digit.
_SAMPLE_ROWS = 1 << 16
# Rows for each column, below which the user is warned.
_ROWS_PER_COLUMN = 10
# Rows multiplied at a time, as float64.
_STEP = 1 << 12
# Weight of the columns themselves, for directions in which the sample has nothing.
_RIDGE = 1e-9


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of token rows to a smaller width; the results are L2-normalized.

    An index stores ``matrix``, which is all there is.

    Attributes:
        matrix: float32 ``[d, width]`` with orthonormal columns.
    """

    matrix: FloatArray

    def __post_init__(self) -> None:
        matrix = self.matrix
        if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or not 1 <= matrix.shape[1] <= matrix.shape[0]:
            raise ValueError(f"matrix has shape {np.shape(matrix)}; it must be [d, width], 1 <= width <= d")
        if matrix.dtype != np.float32 or not np.isfinite(matrix).all():
            raise ValueError(f"matrix is {matrix.dtype}; it must be float32, and finite")

    @classmethod
    def matryoshka(cls, native: int, width: int) -> Projection:
        """The first ``width`` of ``native`` columns.

        Raises:
            InvalidDimensionsError: ``width`` is not an int from 1 to ``native``.
        """
        return cls(np.eye(native, _check_width(width, native), dtype=np.float32))

    @classmethod
    def fit(cls, sample: Ragged | npt.NDArray[Any], width: int) -> Projection:
        """The principal directions of token rows: those in which their squares add up to the most.

        The rows are not centred, since MaxSim compares them by the dot product. Of more than 65,536 rows that many are
        read, evenly spaced. Each direction's largest component is positive.

        Args:
            sample: Token rows ``[rows, d]``, such as those of the first documents of an index.
            width: Columns of the result.

        Raises:
            InvalidDimensionsError: ``width`` is not an int from 1 to ``d``.
            InvalidRequestError: The sample has no rows, or a row that is not finite.
        """
        rows = _rows(sample)
        native = rows.shape[1]
        width = _check_width(width, native)
        if len(rows) == 0:
            raise InvalidRequestError(
                f"a projection to {width} columns needs token rows to be fitted on, and there are none; add texts first"
            )
        if len(rows) > _SAMPLE_ROWS:
            rows = rows[np.linspace(0, len(rows) - 1, _SAMPLE_ROWS).astype(np.int64)]
        squares = np.zeros((native, native))  # [d, d] sum of the rows' outer products
        for start in range(0, len(rows), _STEP):
            step = rows[start : start + _STEP].astype(np.float64)
            squares += step.T @ step
        if not np.isfinite(squares).all():
            raise InvalidRequestError("the sample that a projection is fitted on holds a row that is not finite")
        if len(rows) < _ROWS_PER_COLUMN * width:
            logger.warning(
                "a projection to %d columns is fitted on %d token rows; texts unlike these lose more of their meaning: "
                "add at least %d rows at first, or keep the full width of %d",
                width,
                len(rows),
                _ROWS_PER_COLUMN * width,
                native,
            )
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

    @overload
    def apply(self, rows: Ragged) -> Ragged: ...
    @overload
    def apply(self, rows: npt.NDArray[Any]) -> FloatArray: ...
    def apply(self, rows: Ragged | npt.NDArray[Any]) -> Ragged | FloatArray:
        """Project rows and L2-normalize them; a zero row stays zero.

        Args:
            rows: ``[rows, d]``, or a Ragged of them.

        Returns:
            float32 ``[rows, width]``, or a Ragged of them.

        Raises:
            InvalidRequestError: The rows have another width.
        """
        flat = _rows(rows)
        if flat.shape[1] != self.native:
            raise InvalidRequestError(
                f"the rows have {flat.shape[1]} columns, and the projection was made for {self.native}; "
                "use the model that it was fitted with"
            )
        if self.cuts:
            projected = matryoshka.cut(flat.astype(np.float32, copy=False), self.width, normalize=True)
        else:
            projected = matryoshka.cut(flat.astype(np.float32, copy=False) @ self.matrix, self.width, normalize=True)
        return Ragged(flat=projected, offsets=rows.offsets) if isinstance(rows, Ragged) else projected


def choose(spec: ModelSpec, width: int, sample: Ragged | npt.NDArray[Any] | None = None) -> Projection:
    """The projection of a checkpoint's token rows to ``width``.

    Matryoshka, if the checkpoint says that it was trained for this width; else PCA, fitted on the sample.

    Args:
        spec: The checkpoint.
        width: Columns, 1 to ``spec.hidden_size``.
        sample: Token rows ``[rows, hidden_size]``; read for PCA only.

    Raises:
        InvalidDimensionsError: ``width`` is not an int from 1 to ``spec.hidden_size``.
        InvalidRequestError: PCA without a sample.
    """
    native = spec.hidden_size
    width = _check_width(width, native)
    if is_trained(spec, width):
        return Projection.matryoshka(native, width)
    if sample is None:
        raise InvalidRequestError(
            f"{spec.name} was not trained for a width of {width}: token rows are needed to fit a projection; "
            f"pass sample=, or keep its width of {native}"
        )
    projection = Projection.fit(sample, width)
    if projection.native != native:
        raise InvalidRequestError(f"the sample has {projection.native} columns, and {spec.name} has {native}")
    return projection


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


def _rows(rows: Ragged | npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = rows.flat if isinstance(rows, Ragged) else rows
    if not isinstance(flat, np.ndarray) or flat.ndim != 2:
        raise TypeError(f"rows are of type {type(rows).__name__}; pass an array [rows, d], or a Ragged of them")
    return flat


def _check_width(width: Any, native: int) -> int:
    if isinstance(width, bool) or not isinstance(width, int | np.integer) or not 1 <= width <= native:
        raise InvalidDimensionsError(f"width={width!r} must be an int from 1 to {native}, the width of the token rows")
    return int(width)
