"""QuantizedVectors: vectors as a database stores them, searched exactly, to measure what a format costs in quality."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from millpond.ingest.pages.neighbors import FloatArray, Indices, best_of, nearest, top
from millpond.vectors.quantization import eight_bits

Datatype = Literal["float32", "float16", "bfloat16", "int8", "uint8", "bit"]
Quantization = Literal["scalar", "product", "binary"]

# Scalar quantization: 7 bits between the least and the greatest of the values that its quantile keeps. It
# counts what it cuts at each end by rows, not by values, and cuts nothing of fewer rows.
_SCALAR_STEPS = 127
_SCALAR_QUANTILE = 0.99
_SCALAR_ROWS = 127
# Product quantization: 4 floats become a byte, 16 times less than float32.
_CHUNK = 4
_CENTROIDS = 256
_TRAINING_ROWS = 10_000
_TRAINING_ROUNDS = 10
# uint8: a value of 8 times the root of the mean square of a unit vector is the largest that is kept.
_CLIPPED = 8
# Floats of the candidates that are rescored at a time.
_RESCORED_FLOATS = 1 << 24


class QuantizedVectors(ABC):
    """The rows of a collection in a format."""

    def __init__(self, bytes_per_row: float) -> None:
        self.bytes = bytes_per_row

    @abstractmethod
    def search(self, queries: FloatArray, k: int) -> Indices:
        """``[q, k]``: the rows most similar to ``queries [q, d]`` (float32, normalized), best first."""

    @abstractmethod
    def rescore(self, queries: FloatArray, candidates: Indices, k: int) -> Indices:
        """``[q, k]``: the best of each query's ``candidates [q, c]``."""


class DequantizedVectors(QuantizedVectors):
    """Codes that compare as the floats that they stand for."""

    def __init__(
        self, rows: FloatArray, bytes_per_row: float, encode_queries: Callable[[FloatArray], FloatArray] | None = None
    ) -> None:
        super().__init__(bytes_per_row)
        self._rows = rows
        self._encode = encode_queries or (lambda queries: queries)

    def search(self, queries: FloatArray, k: int) -> Indices:
        """See :class:`QuantizedVectors`."""
        return nearest(self._encode(queries), self._rows, k)

    def rescore(self, queries: FloatArray, candidates: Indices, k: int) -> Indices:
        """See :class:`QuantizedVectors`."""
        encoded = self._encode(queries)
        # By index: of equal scores the lower index first, as in a search.
        candidates = np.sort(candidates, axis=1)
        best = np.empty((len(queries), min(k, candidates.shape[1])), np.int64)
        block = max(1, _RESCORED_FLOATS // max(1, candidates.shape[1] * self._rows.shape[1]))
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            scores = np.einsum("qd,qcd->qc", encoded[part], self._rows[candidates[part]], optimize=True)
            best[part] = np.take_along_axis(candidates[part], top(scores, k), axis=1)
        return best


class SignBits(QuantizedVectors):
    """The signs of the values, compared by the number of equal ones (the Hamming distance)."""

    def __init__(self, rows: FloatArray) -> None:
        super().__init__(-(-rows.shape[1] // 8))
        self._bits = _packed(rows)

    def search(self, queries: FloatArray, k: int) -> Indices:
        """See :class:`QuantizedVectors`."""
        packed = _packed(queries)
        return best_of(lambda rows: _equal_bits(packed, self._bits[rows][None]), len(queries), len(self._bits), k)

    def rescore(self, queries: FloatArray, candidates: Indices, k: int) -> Indices:
        """See :class:`QuantizedVectors`."""
        candidates = np.sort(candidates, axis=1)
        scores = _equal_bits(_packed(queries), self._bits[candidates])
        return np.take_along_axis(candidates, top(scores, k), axis=1)


def store(rows: FloatArray, datatype: Datatype) -> QuantizedVectors:
    """``rows [n, d]`` (normalized) as vectors of a datatype, as millpond writes and compares them.

    - ``float32``, ``float16``, ``bfloat16``: by cosine.
    - ``int8``: the largest value of a row is 127; by cosine.
    - ``uint8``: 8 times the root of the mean square is the largest value that is kept; by Euclidean distance.
    - ``bit``: the signs; by Hamming distance.
    """
    return _DATATYPES[datatype](rows)


def quantize(rows: FloatArray, quantization: Quantization, *, seed: int = 0) -> QuantizedVectors:
    """``rows [n, d]`` (normalized) in the second, smaller copy that a database searches.

    - ``scalar``: 7 bits in a byte, linear between the least and the greatest value but for a few outliers (the
      quantile 0.99).
    - ``binary``: the sign of each value.
    - ``product``: 4 values in a byte: the nearest of 256 centroids (Jegou et al., "Product quantization for nearest
      neighbor search", 2011). The query is not encoded.
    """
    if quantization == "product":
        return _product(rows, seed)
    return _scalar(rows) if quantization == "scalar" else SignBits(rows)


def round_bfloat16(rows: FloatArray) -> FloatArray:
    """``rows`` rounded to the nearest bfloat16 (of two, the even one), as float32. They must be finite."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded: FloatArray = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded


def _float(rows: FloatArray) -> QuantizedVectors:
    return DequantizedVectors(rows, 4 * rows.shape[1])


def _half(rows: FloatArray) -> QuantizedVectors:
    return DequantizedVectors(rows.astype(np.float16).astype(np.float32), 2 * rows.shape[1])


def _bfloat16(rows: FloatArray) -> QuantizedVectors:
    return DequantizedVectors(round_bfloat16(rows), 2 * rows.shape[1], round_bfloat16)


def _int8(rows: FloatArray) -> QuantizedVectors:
    def encode(floats: FloatArray) -> FloatArray:
        return _normalized(eight_bits(floats, "int8").astype(np.float32))

    return DequantizedVectors(encode(rows), rows.shape[1], encode)


def _uint8(rows: FloatArray) -> QuantizedVectors:
    # The codes are 128 higher than what they stand for, so their cosine is another one: a database takes the distance.
    width = rows.shape[1]
    scale = np.float32(127 * max(1.0, math.sqrt(width) / _CLIPPED))

    def decode(floats: FloatArray) -> FloatArray:
        return np.asarray(np.clip(np.rint(floats * scale), -128, 127), np.float32)

    # |q - v|^2 / 2 is |q|^2 / 2 less the product of [q, 1] and [v, -|v|^2 / 2].
    values = decode(rows)
    halves = np.einsum("nd,nd->n", values, values) / np.float32(2)
    ones = np.ones(1, np.float32)
    return DequantizedVectors(
        np.column_stack([values, -halves]),
        width,
        lambda queries: np.column_stack([decode(queries), np.broadcast_to(ones, len(queries))]),
    )


_DATATYPES: Mapping[str, Callable[[FloatArray], QuantizedVectors]] = {
    "float32": _float,
    "float16": _half,
    "bfloat16": _bfloat16,
    "int8": _int8,
    "uint8": _uint8,
    "bit": SignBits,
}


def _scalar(rows: FloatArray) -> QuantizedVectors:
    low, high = rows.min(), rows.max()
    if len(rows) >= _SCALAR_ROWS:
        cut = max(1, int(len(rows) * (1 - _SCALAR_QUANTILE) / 2))  # of all values, at each end
        low, high = np.partition(rows, (cut, rows.size - 1 - cut), axis=None)[[cut, rows.size - 1 - cut]]
    step = np.float32(max(high - low, 1e-12) / _SCALAR_STEPS)

    def encode(floats: FloatArray) -> FloatArray:
        codes = np.clip(np.rint((floats - low) / step), 0, _SCALAR_STEPS)
        return np.asarray(codes * step + low, np.float32)

    # A float beside the codes of each row holds what a product of codes lacks.
    return DequantizedVectors(encode(rows), rows.shape[1] + 4, encode)


def _product(rows: FloatArray, seed: int) -> QuantizedVectors:
    random = np.random.default_rng(seed)
    sample = rows[np.sort(random.permutation(len(rows))[:_TRAINING_ROWS])]
    decoded = np.empty_like(rows)
    starts = range(0, rows.shape[1], _CHUNK)
    for start in starts:
        chunk = slice(start, start + _CHUNK)
        centroids = _centroids(np.ascontiguousarray(sample[:, chunk]), random)
        decoded[:, chunk] = centroids[_owners(np.ascontiguousarray(rows[:, chunk]), centroids)]
    return DequantizedVectors(decoded, len(starts))


def _centroids(points: FloatArray, random: np.random.Generator) -> FloatArray:
    """``[min(256, n), c]``: Lloyd's k-means of ``points [n, c]``; a centroid that loses its points stays."""
    centroids = points[np.sort(random.permutation(len(points))[:_CENTROIDS])]
    for _ in range(_TRAINING_ROUNDS):
        owner = _owners(points, centroids)
        counts = np.bincount(owner, minlength=len(centroids))
        sums = [np.bincount(owner, column, len(centroids)) for column in points.T]
        means = np.stack(sums, axis=1) / np.maximum(counts, 1)[:, None]
        centroids = np.where(counts[:, None] > 0, means, centroids).astype(np.float32)
    return centroids


def _owners(points: FloatArray, centroids: FloatArray) -> npt.NDArray[np.intp]:
    """``[n]``: the nearest centroid of each point."""
    squares = np.einsum("kc,kc->k", centroids, centroids)
    return np.concatenate(
        [
            (squares - 2 * (points[start : start + 8192] @ centroids.T)).argmin(axis=1)
            for start in range(0, len(points), 8192)
        ]
    )


def _normalized(rows: FloatArray) -> FloatArray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    result: FloatArray = rows / np.maximum(norms, np.float32(1e-12))
    return result


def _packed(rows: FloatArray) -> npt.NDArray[np.uint64]:
    """``[n, ceil(d / 64)]``: the signs of ``rows [n, d]``; what pads them is equal in every row."""
    octets = np.packbits(rows > 0, axis=1)
    padded = np.zeros((len(rows), -(-octets.shape[1] // 8) * 8), np.uint8)
    padded[:, : octets.shape[1]] = octets
    return padded.view(np.uint64)


def _equal_bits(queries: npt.NDArray[np.uint64], rows: npt.NDArray[np.uint64]) -> FloatArray:
    """float32 ``[q, n]``: minus the bits that differ, of ``queries [q, w]`` and ``rows [1 or q, n, w]``."""
    different = np.zeros((len(queries), rows.shape[1]), np.int32)
    for word in range(queries.shape[1]):  # one word at a time: all of them need eight times the memory
        different += np.bitwise_count(queries[:, word, None] ^ rows[:, :, word])
    return -different.astype(np.float32)
