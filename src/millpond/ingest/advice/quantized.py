"""QuantizedVectors: vectors as a database stores them, searched exactly, to measure what a format costs in quality."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from millpond.ingest.pages.neighbors import FloatArray, Indices, nearest, top
from millpond.vectors.quantization import eight_bits
from millpond.vectors.small_floats import from_bfloat16, to_bfloat16

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


class QuantizedVectors:
    """The rows of a collection in a format: float32 ``[n, d]``, what each code stands for, and the bytes of a row.

    ``encode_queries`` is what the database makes of the queries before it compares.
    """

    def __init__(
        self, rows: FloatArray, bytes_per_row: float, encode_queries: Callable[[FloatArray], FloatArray] | None = None
    ) -> None:
        self.bytes = bytes_per_row
        self._rows = rows
        self._encode = encode_queries or (lambda queries: queries)

    def search(self, queries: FloatArray, k: int) -> Indices:
        """``[q, k]``: the rows most similar to ``queries [q, d]`` (float32, normalized), best first."""
        return nearest(self._encode(queries), self._rows, k)

    def rescore(self, queries: FloatArray, candidates: Indices, k: int) -> Indices:
        """``[q, k]``: the best of each query's ``candidates [q, c]``."""
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


def store(rows: FloatArray, datatype: Datatype) -> QuantizedVectors:
    """``rows [n, d]`` (normalized) as vectors of a datatype, as millpond writes and compares them."""
    width = rows.shape[1]
    match datatype:
        case "float32":
            return QuantizedVectors(rows, 4 * width)
        case "float16":
            return QuantizedVectors(rows.astype(np.float16).astype(np.float32), 2 * width)
        case "bfloat16":
            return QuantizedVectors(round_bfloat16(rows), 2 * width, round_bfloat16)
        case "int8":
            return QuantizedVectors(_int8(rows), width, _int8)
        case "uint8":  # compared by Euclidean distance, the others by cosine
            return _uint8(rows)
        case "bit":  # compared by Hamming distance
            return QuantizedVectors(_signs(rows), -(-width // 8), _signs)


def quantize(rows: FloatArray, quantization: Quantization, *, seed: int = 0) -> QuantizedVectors:
    """``rows [n, d]`` (normalized) in the second, smaller copy that a database searches."""
    match quantization:
        case "product":  # Jegou et al., "Product quantization for nearest neighbor search", 2011
            return _product(rows, seed)
        case "scalar":
            return _scalar(rows)
        case "binary":
            return store(rows, "bit")


def round_bfloat16(rows: FloatArray) -> FloatArray:
    """``rows`` rounded to the nearest bfloat16 (of two, the even one), as float32."""
    return from_bfloat16(to_bfloat16(rows))


def _signs(rows: FloatArray) -> FloatArray:
    """1 and -1 for each sign: their products are in the order of the Hamming distances of the bits."""
    return np.where(rows > 0, np.float32(1), np.float32(-1))


def _int8(rows: FloatArray) -> FloatArray:
    codes = eight_bits(rows, "int8").astype(np.float32)
    result: FloatArray = codes / np.maximum(np.linalg.norm(codes, axis=1, keepdims=True), np.float32(1e-12))
    return result


def _uint8(rows: FloatArray) -> QuantizedVectors:
    # The codes are 128 higher than what they stand for, so their cosine is another one: a database takes the distance.
    width = rows.shape[1]
    scale = np.float32(127 * max(1.0, math.sqrt(width) / _CLIPPED))

    def decode(floats: FloatArray) -> FloatArray:
        return np.asarray(np.clip(np.rint(floats * scale), -128, 127), np.float32)

    # |q - v|^2 / 2 is |q|^2 / 2 less the product of [q, 1] and [v, -|v|^2 / 2].
    values = decode(rows)
    halves = np.einsum("nd,nd->n", values, values) / np.float32(2)
    return QuantizedVectors(
        np.column_stack([values, -halves]),
        width,
        lambda queries: np.column_stack([decode(queries), np.ones(len(queries), np.float32)]),
    )


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
    return QuantizedVectors(encode(rows), rows.shape[1] + 4, encode)


def _product(rows: FloatArray, seed: int) -> QuantizedVectors:
    random = np.random.default_rng(seed)
    sample = rows[np.sort(random.permutation(len(rows))[:_TRAINING_ROWS])]
    decoded = np.empty_like(rows)
    starts = range(0, rows.shape[1], _CHUNK)
    for start in starts:
        chunk = slice(start, start + _CHUNK)
        centroids = _centroids(np.ascontiguousarray(sample[:, chunk]), random)
        decoded[:, chunk] = centroids[_owners(np.ascontiguousarray(rows[:, chunk]), centroids)]
    return QuantizedVectors(decoded, len(starts))


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
