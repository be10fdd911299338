"""Vectors of the units in memory, as of the file's last change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from millpond.mcp.folder.store import FloatArray, Snapshot


class VectorTable:
    """Rows ascending, and their vectors; a refresh reads what is new and drops what went. For one thread at a time."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.matrix: FloatArray = np.zeros((0, 0), np.float32)
        self._state: tuple[str, int] | None = None

    def refresh(self, snapshot: Snapshot) -> None:
        """Become what a snapshot has."""
        state = snapshot.state()
        if state == self._state:
            return
        if self._state is None or state[0] != self._state[0]:  # another file, whose rows have the same numbers
            self.rows, self.matrix = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
        live = snapshot.rows()
        kept = np.isin(self.rows, live, assume_unique=True)
        last = int(self.rows[-1]) if len(self.rows) else 0
        rows, matrix = snapshot.vectors_after(last)
        old = self.matrix if kept.all() else self.matrix[kept]
        self.matrix = matrix if not len(old) else (old if not len(matrix) else np.concatenate([old, matrix]))
        self.rows = np.concatenate([self.rows[kept], rows])
        self._state = state

    def nearest(
        self, query: FloatArray, most: int, accepted: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None
    ) -> list[tuple[int, float]]:
        """Rows and cosines of the units nearest to a vector ``[d]`` of length 1, best first."""
        if not len(self.rows):
            return []
        scores = self.matrix @ query  # [n]
        if accepted is not None:
            scores = np.where(accepted(self.rows), scores, -np.inf)
        count = min(most, len(scores))
        best = np.argpartition(-scores, count - 1)[:count]
        best = best[np.lexsort((self.rows[best], -scores[best]))]
        return [(int(self.rows[each]), float(scores[each])) for each in best if np.isfinite(scores[each])]
