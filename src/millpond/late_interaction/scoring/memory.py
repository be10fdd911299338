"""Memory for packed rows: of this process, or of a device of torch (``millpond.late_interaction.cuda``)."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.rows import Codec, ScaleArray
from millpond.late_interaction.kernels.compiled import aligned
from millpond.late_interaction.scoring.exact import Tokens, score
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


class Scorer(Protocol):
    """MaxSim of queries with stored documents, all of them or those of some indices: float32 ``[q, documents]``."""

    def __call__(
        self, queries: Ragged, *, documents: IndexArray | None = None, threads: int | None = None
    ) -> FloatArray:
        """The scores; ``threads`` are those of the CPU."""


class Rows(Protocol):
    """Room for packed rows, written once each."""

    def write(self, first: int, rows: npt.NDArray[Any], scales: ScaleArray | None) -> None:
        """Write packed rows ``[n, columns]`` from row ``first`` on, with their scales ``[n]``."""

    def read(self, rows: slice | IndexArray) -> tuple[npt.NDArray[Any], ScaleArray | None]:
        """Packed rows in host memory, and their scales."""

    def scorer(self, rows: int, offsets: IndexArray) -> Scorer:
        """Compares queries with the documents ``offsets`` ``[n + 1]`` of the first rows."""


class Memory(Protocol):
    """Where the rows of an index are."""

    device: str
    coded: bool  # whether searches scan codes of the rows before they compare some of them

    def rows(self, codec: Codec, columns: int, capacity: int) -> Rows:
        """Room for ``capacity`` packed rows of so many columns."""


class HostMemory:
    """Memory of this process, which the compiled kernels read."""

    device, coded = "cpu", True

    def rows(self, codec: Codec, columns: int, capacity: int) -> Rows:
        """Room for rows. What was never written to takes no memory."""
        return _HostRows(codec, columns, capacity)


class _HostRows:
    """Rows that begin at a cache line."""

    def __init__(self, codec: Codec, columns: int, capacity: int) -> None:
        self._codec = codec
        self._rows = aligned((capacity, columns), codec.dtype.type)
        self._scales = np.empty(capacity, dtype=np.float16) if codec.scaled else None

    def write(self, first: int, rows: npt.NDArray[Any], scales: ScaleArray | None) -> None:
        """As :meth:`Rows.write`."""
        self._rows[first : first + len(rows)] = rows
        if self._scales is not None and scales is not None:
            self._scales[first : first + len(rows)] = scales

    def read(self, rows: slice | IndexArray) -> tuple[npt.NDArray[Any], ScaleArray | None]:
        """As :meth:`Rows.read`; of a slice they are not copied."""
        return self._rows[rows], None if self._scales is None else self._scales[rows]

    def scorer(self, rows: int, offsets: IndexArray) -> Scorer:
        """As :meth:`Rows.scorer`."""
        packed, scales = self.read(slice(0, rows))
        return partial(score, tokens=Tokens(codec=self._codec, rows=packed, scales=scales, offsets=offsets))
