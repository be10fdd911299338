"""StaticEncoder: a table of token vectors in the place of a backbone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native.encoder import Ints, Rows
from millpond.native.library import portable


class StaticEncoder:
    """Token vectors, gathered or averaged; any number of threads may call it at once."""

    def __init__(self, rows: npt.NDArray[np.float32]) -> None:
        """``rows [tokens, width]``; the id after the last one stands for no token, and its row is 0."""
        self.rows = np.ascontiguousarray(rows)
        # What a batch's number of threads is chosen by.
        self.plan = SimpleNamespace(weights=rows.shape[1])

    def encode(self, ids: Ints, bounds: Ints, *, rows: Rows = "all", skip: Ints | None = None, **_: Any) -> Any:
        """As :meth:`NativeEncoder.encode`; what concerns layers means nothing here."""
        tokens = len(self.rows)
        if ids.max() > tokens or ids.min() < 0:
            raise IndexError(f"token {ids.max()} is outside of the vocabulary of {tokens}")
        begins, ends = bounds[:-1] if skip is None else bounds[:-1] + skip, bounds[1:]
        if rows == "mean":
            return self._means(ids, begins, ends)
        chosen = ids if rows == "all" else ids[begins if rows == "first" else ends - 1]
        return self._gathered(chosen)

    def _gathered(self, ids: Ints) -> npt.NDArray[np.float32]:
        out = self.rows.take(ids, axis=0, mode="clip")
        out[ids == len(self.rows)] = 0
        return out

    def _means(self, ids: Ints, begins: Ints, ends: Ints) -> npt.NDArray[np.float32]:
        """``[texts, width]``."""
        out = np.zeros((len(begins), self.rows.shape[1]), dtype=np.float32)
        library = portable()
        if library is None:
            for row, begin, end in zip(out, begins.tolist(), ends.tolist(), strict=True):
                np.mean(self._gathered(ids[begin:end]), axis=0, out=row)
            return out
        ids, begins, ends = (np.ascontiguousarray(array, dtype=np.int32) for array in (ids, begins, ends))
        arrays = (out, self.rows, ids, begins, ends)
        library.millpond_mean_rows(*(array.ctypes.data for array in arrays), len(out), *self.rows.shape)
        return out
