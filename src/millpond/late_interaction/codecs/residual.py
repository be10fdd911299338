"""Residual codec: a token vector as the code of its centroid, and what remains in 2 or 4 bits a dimension."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.kernels.centroids import Centroids, nearest, squared_distances
from millpond.late_interaction.kernels.compiled import compiled, fields, run, thread_count
from millpond.support.cached_property import cached_property

FloatArray = npt.NDArray[np.float32]

# Lloyd-Max levels of a unit Gaussian: its quantization with the least squared error.
_LEVELS = {
    0: (),
    2: (-1.510, -0.4528, 0.4528, 1.510),
    4: (
        *(-2.733, -2.069, -1.618, -1.256, -0.9424, -0.6568, -0.3881, -0.1284),
        *(0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
    ),
}
_STD_ROWS = 100_000  # rows of the sample that the spread of the residuals is measured on
FAR_SHARE = 0.01
"""The share of the rows that centroids are trained on that counts as far from its centroid."""
_STORED_ROWS = 8_192  # rows of the sample that are encoded to see how far they seem then
# A dimension without spread in the sample may have some elsewhere: it must not outweigh all others there.
_LEAST_SPREAD = 0.05
_BLOCK = 1 << 15  # rows encoded at a time without the kernel


class _EncodeCall(ctypes.Structure):
    """``struct EncodeCall`` of residuals.h."""

    _fields_ = fields(
        pointers="rows centroids codes std levels scales residuals", integers="count dim bits width threads next failed"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Encoded rows."""

    codes: npt.NDArray[np.uint16]  # uint16 `[n]`, the centroid of each row
    scales: npt.NDArray[np.float16]  # float16 `[n]`, the scale of each row's residual
    # uint8 `[n, ceil(d * bits / 8)]`. With `width` bytes a row, byte `j` holds the dimensions `j`, `j + width`, ...,
    # the first of them in the lowest bits.
    residuals: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualCodec:
    """A trained codec. A row is read as ``centroid + scale * std * level[bits]``."""

    centroids: Centroids
    std: FloatArray  # float32 `[d]`, the spread of each dimension of the residuals
    bits: int  # 2 or 4 bits a dimension; 0 keeps no residuals, for rows that are stored in another way
    # the squared distances from its centroid beyond which a row is far, of rows and of what is stored of them: all but
    # `FAR_SHARE` of the rows of the training are nearer; `None` of a file that was written before there were such
    limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.std.shape != (self.centroids.dim,) or self.std.dtype != np.float32:
            raise ValueError(f"std is {self.std.dtype} {self.std.shape}, not float32 [{self.centroids.dim}]")

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.centroids.dim

    @property
    def width(self) -> int:
        """Bytes of a row's residual."""
        return -(-self.dim * self.bits // 8)

    @cached_property
    def levels(self) -> npt.NDArray[np.int8]:
        """int8 ``[2 ** bits]``: the level of each residual number, in units of ``level_scale``."""
        return np.rint(np.array(_LEVELS[self.bits]) / self.level_scale).astype(np.int8)

    @property
    def level_scale(self) -> float:
        """The value of level 1, in standard deviations."""
        return max(_LEVELS[self.bits], default=127.0) / 127

    @classmethod
    def train(
        cls, sample: FloatArray, *, bits: int, k: int, seed: int = 0, threads: int | None = None
    ) -> ResidualCodec:
        """Train ``k`` centroids on a sample ``[n, d]`` of unit rows in random order, and measure what they leave."""
        centroids = Centroids.of(kmeans.train(sample, k, seed=seed, threads=threads))
        some = np.asarray(sample[:_STD_ROWS], dtype=np.float32)
        residuals = some - centroids.values[nearest(some, centroids, threads=threads)]
        limit = far_limit(np.einsum("nd,nd->n", residuals, residuals))
        spread = residuals.std(axis=0)
        typical = float(np.sqrt(np.square(spread, dtype=np.float64).mean()))
        std = np.maximum(spread, _LEAST_SPREAD * typical) if typical > 0 else np.ones_like(spread)
        codec = cls(centroids=centroids, std=std.astype(np.float32), bits=bits, limits=(limit, limit))
        if bits:
            stored = codec.stored_distances(codec.encode(some[:_STORED_ROWS], threads=threads))
            codec = replace(codec, limits=(limit, far_limit(stored)))
        return codec

    def extended(self, values: FloatArray) -> ResidualCodec:
        """The codec with further centroids ``[k, d]``; what it has encoded is read as before."""
        return replace(self, centroids=self.centroids.extended(values))

    def distances(self, rows: npt.NDArray[np.floating[Any]], *, threads: int | None = None) -> FloatArray:
        """The squared distance ``[n]`` of each of ``n`` rows from the nearest centroid."""
        return squared_distances(rows, self.centroids, nearest(rows, self.centroids, threads=threads))

    def stored_distances(self, stored: Encoded) -> FloatArray:
        """The squared distance ``[n]`` of what is stored of rows from their centroids."""
        steps = self.levels[unpack(stored.residuals, self.bits, self.dim)] * (self.std * np.float32(self.level_scale))
        found: FloatArray = np.einsum("nd,nd->n", steps, steps) * np.square(stored.scales.astype(np.float32))
        return found

    def encode(self, rows: npt.NDArray[np.floating[Any]], *, threads: int | None = None) -> Encoded:
        """Encode rows ``[n, d]``. A row's encoding does not depend on the others.

        A residual is divided by ``std`` and by its own root mean square, and each number rounded to the nearest level.
        The scale of the result makes its error small above all along the row itself: queries that find a row point the
        same way, so that part of the error counts ``d`` times as much as the others. (The loss is that of anisotropic
        vector quantization, arXiv 1908.10396; with one number a row to choose, its minimum is a quotient.)
        """
        codes = nearest(rows, self.centroids, threads=threads)
        scales = np.zeros(len(rows), dtype=np.float16)
        packed = np.zeros((len(rows), self.width), dtype=np.uint8)
        kernel = compiled("encode_residuals")
        if self.bits and kernel is not None:
            levels = self.levels * np.float32(self.level_scale)
            arrays = (np.ascontiguousarray(rows, dtype=np.float32), self.centroids.values, codes, self.std, levels)
            sizes = (len(rows), self.dim, self.bits, self.width, thread_count(threads))
            run(kernel, _EncodeCall, (*arrays, scales, packed), *sizes)
        elif self.bits:
            for begin in range(0, len(rows), _BLOCK):
                some = slice(begin, begin + _BLOCK)
                scales[some], packed[some] = self._encoded(np.asarray(rows[some], dtype=np.float32), codes[some])
        return Encoded(codes=codes, scales=scales, residuals=packed)

    def _encoded(self, rows: FloatArray, codes: npt.NDArray[np.uint16]) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
        """Scales and packed residuals of some rows, without the kernel."""
        levels = self.levels * np.float32(self.level_scale)
        residuals = rows - self.centroids.values[codes]
        spread = residuals / self.std
        spread /= np.sqrt(np.square(spread).mean(axis=1, keepdims=True)) + np.float32(1e-9)
        numbers = np.searchsorted((levels[1:] + levels[:-1]) / 2, spread.ravel()).astype(np.uint8).reshape(spread.shape)
        scale = _scale(rows, residuals, levels[numbers] * self.std)
        return np.minimum(scale, np.finfo(np.float16).max), pack(numbers, self.bits)


def far_limit(distances: FloatArray) -> float:
    """The squared distance beyond which a row is far, by those of the rows that centroids were trained on."""
    return float(np.quantile(distances, 1 - FAR_SHARE)) if len(distances) else 0.0


def _scale(rows: FloatArray, residuals: FloatArray, steps: FloatArray) -> FloatArray:
    """The scales of ``steps``, the quantized residuals; at most twice or half the one of least squared error."""

    def products(a: FloatArray, b: FloatArray) -> FloatArray:
        each: FloatArray = np.einsum("nd,nd->n", a, b)
        return each

    length, size = products(rows, rows), products(steps, steps)
    along, wanted, match = products(rows, steps), products(rows, residuals), products(residuals, steps)
    weight = rows.shape[1] / np.where(length > 0, length, np.inf)
    plain = match / size
    scale: FloatArray = (weight * along * wanted + match) / (weight * along * along + size)
    return np.clip(scale, plain / 2, plain * 2)


def pack(numbers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Numbers below ``2 ** bits``, ``[n, d]``, in ``ceil(d * bits / 8)`` bytes a row."""
    rows, dim = numbers.shape
    parts = 8 // bits
    width = -(-dim // parts)
    padded = np.zeros((rows, parts * width), dtype=np.uint8)
    padded[:, :dim] = numbers
    shifts = np.arange(parts, dtype=np.uint8)[:, None] * np.uint8(bits)
    packed: npt.NDArray[np.uint8] = np.bitwise_or.reduce(padded.reshape(rows, parts, width) << shifts, axis=1)
    return packed


def unpack(packed: npt.NDArray[np.uint8], bits: int, dim: int) -> npt.NDArray[np.uint8]:
    """The numbers ``[n, dim]`` of :func:`pack`."""
    mask = np.uint8((1 << bits) - 1)
    parts = [(packed >> np.uint8(part * bits)) & mask for part in range(8 // bits)]
    return np.concatenate(parts, axis=1)[:, :dim]
