"""Sums of rows: of the tokens of a cluster, or of a cell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millpond.native.library import portable

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def row_sums(rows: FloatArray, places: IndexArray, count: int) -> FloatArray:
    """float32 ``[count, d]``: the sum of the rows ``[n, d]`` that each place is named for, added in their order.

    Args:
        rows: ``[n, d]``.
        places: ``[n]``, the sum that each row belongs to, from 0 to ``count - 1``.
        count: Number of sums; one without rows is 0.
    """
    width = rows.shape[1]
    sums = np.zeros((count, width), dtype=np.float32)
    library = portable()
    if library is None:
        cells = (places[:, None] * width + np.arange(width)).ravel()  # one axis: numpy adds along several slowly
        np.add.at(sums.reshape(-1), cells, rows.ravel())
        return sums
    rows, places = np.ascontiguousarray(rows), np.ascontiguousarray(places)
    library.millpond_add_rows(sums.ctypes.data, rows.ctypes.data, places.ctypes.data, len(rows), width)
    return sums
