"""Ragged: n matrices of one width and different heights, stored as one flat matrix with offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """A list of ``[rows_i, d]`` matrices in one allocation.

    ``np.asarray`` gives ``[n, rows, d]`` if all have the same number of rows.

    Attributes:
        flat: ``[total, d]``, every row of every matrix in order.
        offsets: ``[n + 1]`` int64; matrix ``i`` is ``flat[offsets[i]:offsets[i + 1]]``.
    """

    flat: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        offsets = self.offsets
        if self.flat.ndim != 2:
            raise ValueError(f"flat has shape {self.flat.shape}; it must be [total, d]")
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.flat):
            raise ValueError(f"offsets must run from 0 to {len(self.flat)} (the rows of flat)")
        if np.any(np.diff(offsets) < 0):
            raise ValueError("offsets must not decrease")

    @classmethod
    def from_matrices(cls, matrices: Sequence[npt.NDArray[Any]], *, width: int) -> Ragged:
        """Concatenate matrices, copying them once.

        Args:
            matrices: ``[rows_i, width]`` each.
            width: Their columns, for an empty list.

        Returns:
            The ``n`` matrices in order: ``flat [total, width]``, ``offsets [n + 1]``.

        Raises:
            ValueError: The matrices have different widths.
        """
        offsets = np.zeros(len(matrices) + 1, dtype=np.int64)
        np.cumsum([len(matrix) for matrix in matrices], out=offsets[1:])
        flat = np.concatenate(matrices) if matrices else np.empty((0, width), dtype=np.float32)
        return cls(flat=flat, offsets=offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        """Matrix ``index`` as a view ``[rows, d]``; a slice gives a list of views."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} matrices")
        index %= len(self)
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """``[n, rows, d]``, if every matrix has the same number of rows.

        Raises:
            ValueError: The matrices have different numbers of rows.
        """
        lengths = self.lengths
        rows = int(lengths[0]) if len(self) else 0
        if (lengths != rows).any():
            raise ValueError(
                f"the {len(self)} matrices have {lengths.min()} to {lengths.max()} rows, which no array can hold; "
                "iterate over them, or use .flat [total, d] and .offsets [n + 1]"
            )
        return np.array(self.flat.reshape(len(self), rows, self.flat.shape[1]), dtype=dtype, copy=copy)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``[n]`` number of rows of each matrix."""
        return np.diff(self.offsets)


def runs(ends: npt.NDArray[np.int64], rows: int, matrices: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` over runs of at most ``matrices`` matrices and ``rows`` rows, or of a single matrix.

    ``ends`` is ``[n + 1]``: where each matrix begins and the last one ends.
    """
    start, count = 0, len(ends) - 1
    while start < count:
        fits = int(np.searchsorted(ends, ends[start] + rows, side="right")) - 1
        stop = max(start + 1, min(fits, start + matrices))
        yield start, stop
        start = stop
