"""MUVERA: token matrices as single vectors, whose dot product approximates MaxSim (Dhulipala et al., 2024, 2405.19504).

Random hyperplanes divide the space into cells. A query's vector holds the sum of its tokens in each cell, a document's
the mean: a query's token meets the mean of the document's tokens that are near it. A database of plain vectors finds
the candidates by these fixed dimensional encodings, and exact MaxSim sorts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.late_interaction.encoding.row_sums import row_sums
from millpond.support.cached_property import cached_property
from millpond.vectors.ragged import Ragged, runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Space is divided so often, each time by so many other hyperplanes into 2^3 cells, whose tokens are projected to so
# many columns by random signs. Of the exact top 10 over MiniLM's token states (width 128) the 2,560 dimensions find
# 99 % among the best 200 of 1,398 documents, 94 % of 5,000, and 85 % of 99,000: there the best 1,000 have 97 %. In int8
# they find the same. More cells and fewer projected columns find less (82 % with 4 hyperplanes and 8 columns).
_REPETITIONS, _BITS, _PROJECTED = 20, 3, 16
_CELLS = 1 << _BITS
# Floats computed at a time, over the tokens of whole matrices: 8 MiB.
_BLOCK = 1 << 21
# A component of a hyperplane is the sum of eight bytes, which is nearly Gaussian: this is its mean.
_BYTES_MEAN = 8 * 255 // 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Muvera:
    """The encoding of token rows of ``width`` columns.

    The random numbers are SplitMix64 (Steele et al., 2014) in integer arithmetic, so they depend on no library. The
    encodings themselves may differ in the last bits between machines, as matrix products do, and a token that lies on
    a hyperplane may change sides.
    """

    width: int

    def parameters(self) -> dict[str, int | None]:
        """Everything that decides an encoding, as an index stores it: other ones may exist one day."""
        fixed = {"repetitions": _REPETITIONS, "bits": _BITS, "projected": _PROJECTED, "dimensions": None, "seed": 0}
        return {"width": self.width, **fixed}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Muvera:
        """The encoding of :meth:`parameters`; ValueError if they are not those of this version."""
        encoding = cls(parameters["width"])
        if encoding.parameters() != parameters:
            raise ValueError(f"MUVERA with {dict(parameters)} is unknown")
        return encoding

    @property
    def output_dimensions(self) -> int:
        """Columns of an encoding."""
        return _REPETITIONS * _CELLS * self._cell_width

    def encode_queries(self, queries: Ragged) -> FloatArray:
        """float32 ``[n, output_dimensions]``: the sum of the tokens in each cell; zeros for a query without tokens.

        The dot product with a document's encoding is an estimate of its MaxSim.
        """
        return self._encode(queries, documents=False)

    def encode_documents(self, documents: Ragged) -> FloatArray:
        """float32 ``[n, output_dimensions]``: the mean of the tokens in each cell; zeros for a document without tokens.

        An empty cell has that of the nearest one: behind the fewest hyperplanes (Hamming distance).
        """
        return self._encode(documents, documents=True)

    @property
    def _cell_width(self) -> int:
        return min(_PROJECTED, self.width)

    @cached_property
    def _planes(self) -> FloatArray:
        """``[width, repetitions * bits]`` normals of the hyperplanes."""
        numbers = _random(0, self.width * _REPETITIONS * _BITS)
        sums = numbers.view(np.uint8).reshape(len(numbers), 8).sum(axis=1, dtype=np.int64) - _BYTES_MEAN
        return np.ascontiguousarray(sums.reshape(-1, self.width).T, dtype=np.float32)

    @cached_property
    def _signs(self) -> FloatArray:
        """``[width, repetitions * projected]``: the projection of tokens, scaled to keep the size of dot products."""
        cell_width = self._cell_width
        if cell_width == self.width:
            return np.tile(np.eye(self.width, dtype=np.float32), (1, _REPETITIONS))
        numbers = _random(1, self.width * _REPETITIONS * cell_width)
        signs = np.where(numbers >> np.uint64(63), np.float32(1), np.float32(-1)).reshape(-1, self.width).T
        return np.ascontiguousarray(signs / np.float32(cell_width**0.5))

    def _encode(self, matrices: Ragged, *, documents: bool) -> FloatArray:
        if matrices.flat.shape[1] != self.width:
            raise InvalidRequestError(
                f"the rows have {matrices.flat.shape[1]} columns, and this encoding is for {self.width}; "
                "use the model and the width that it was made for"
            )
        encodings = np.empty((len(matrices), self.output_dimensions), dtype=np.float32)
        most_tokens = max(1, _BLOCK // (_REPETITIONS * (self._cell_width + _BITS)))
        for start, stop in runs(matrices.offsets, most_tokens, max(1, _BLOCK // self.output_dimensions)):
            first, last = matrices.offsets[start], matrices.offsets[stop]
            rows = matrices.flat[first:last].astype(np.float32, copy=False)
            cells = self._cells(rows, matrices.lengths[start:stop], documents=documents)
            encodings[start:stop] = cells.reshape(stop - start, -1)
        return encodings

    def _cells(self, rows: FloatArray, lengths: IndexArray, *, documents: bool) -> FloatArray:
        """``[n * repetitions * cells, projected]`` of ``n`` matrices with the given lengths."""
        count = len(lengths)
        inside = (rows @ self._planes).reshape(len(rows), _REPETITIONS, _BITS) > 0
        codes = inside @ (1 << np.arange(_BITS))  # [tokens, repetitions] the cell of each token
        projected = (rows @ self._signs).reshape(-1, self._cell_width)  # [tokens * repetitions, projected]
        matrix_of = np.repeat(np.arange(count), lengths)
        places = ((matrix_of[:, None] * _REPETITIONS + np.arange(_REPETITIONS)) * _CELLS + codes).ravel()
        result = row_sums(projected, places, count * _REPETITIONS * _CELLS)
        if documents:
            tokens = np.bincount(places, minlength=len(result)).astype(np.float32)
            result /= np.maximum(tokens, 1)[:, None]
            result = result[_nearest_filled(tokens.reshape(-1, _CELLS) > 0)]
        result *= np.float32(_REPETITIONS**-0.5)
        return result


def _nearest_filled(filled: npt.NDArray[np.bool_]) -> IndexArray:
    """Of ``[groups, cells]`` the filled cell nearest to each by Hamming distance, or itself if all are empty."""
    groups, cells = filled.shape
    own = np.arange(groups * cells).reshape(groups, cells)
    source = np.where(filled, own, -1)
    for _ in range(_BITS):  # cells at distance 1, 2, ... of a filled one
        before = source
        for bit in range(_BITS):
            neighbour = before[:, np.arange(cells) ^ (1 << bit)]
            source = np.where(source >= 0, source, neighbour)
    return np.where(source >= 0, source, own).ravel()


def _random(stream: int, count: int) -> npt.NDArray[np.uint64]:
    """``count`` numbers of 64 random bits: SplitMix64 of a counter whose start ``stream`` chooses."""
    start = _mix(np.array([stream], dtype=np.uint64))
    return _mix(start + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function; products wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
