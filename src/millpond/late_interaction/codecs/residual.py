"""Residual codec: a token vector as the code of its centroid, and what remains in 2 or 4 bits a dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs import kmeans
from millpond.late_interaction.kernels import residuals as kernel
from millpond.late_interaction.kernels.centroids import Centroids, nearest
from millpond.support.cached_property import cached_property

# Lloyd-Max levels of a unit Gaussian: its quantization with the least squared error.
_LEVELS = {
    0: (),
    2: (-1.510, -0.4528, 0.4528, 1.510),
    4: (
        *(-2.733, -2.069, -1.618, -1.256, -0.9424, -0.6568, -0.3881, -0.1284),
        *(0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
    ),
}
BITS = (2, 4)
_STD_ROWS = 100_000  # rows of the sample that the spread of the residuals is measured on
# A dimension without spread in the sample may have some elsewhere: it must not outweigh all others there.
_LEAST_SPREAD = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Encoded rows.

    Attributes:
        codes: uint16 ``[n]``, the centroid of each row.
        scales: float16 ``[n]``, the scale of each row's residual.
        residuals: uint8 ``[n, ceil(d * bits / 8)]``. With ``width`` bytes a row, byte ``j`` holds the dimensions
            ``j``, ``j + width``, ..., the first of them in the lowest bits.
    """

    codes: npt.NDArray[np.uint16]
    scales: npt.NDArray[np.float16]
    residuals: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualCodec:
    """A trained codec.

    A row is read as ``centroid + scale * std * level[bits]``.

    Attributes:
        centroids: The centroids.
        std: float32 ``[d]``, the spread of each dimension of the residuals.
        bits: 2 or 4 bits a dimension; 0 keeps no residuals, for rows that are stored in another way.
    """

    centroids: Centroids
    std: npt.NDArray[np.float32]
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _LEVELS:
            raise ValueError(f"bits is {self.bits}; it must be 2 or 4, or 0 for no residuals")
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
        cls,
        sample: npt.NDArray[np.float32],
        *,
        bits: int,
        k: int | None = None,
        rounds: int = 3,
        seed: int = 0,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ResidualCodec:
        """Train the centroids on a sample, and measure the residuals that they leave.

        Args:
            sample: ``[n, d]``, L2-normalized; :func:`~millpond.late_interaction.codecs.kmeans.sample_count` says how
                many of a collection. Rows in a random order.
            bits: As the attribute.
            k: Centroids; ``None`` is :func:`millpond.late_interaction.codecs.kmeans.centroid_count` of the sample.
            rounds: Rounds of k-means.
            seed: Of k-means.
            threads: Most threads; ``None`` is as many as torch uses.
            progress: Called with the rounds of k-means done and their number.

        Raises:
            ValueError: The sample has no rows.
        """
        k = kmeans.centroid_count(len(sample)) if k is None else k
        trained = kmeans.train(sample, k, rounds=rounds, seed=seed, threads=threads, progress=progress)
        centroids = Centroids.of(trained)
        some = np.asarray(sample[:_STD_ROWS], dtype=np.float32)
        spread = (some - centroids.values[nearest(some, centroids, threads=threads)]).std(axis=0)
        typical = float(np.sqrt(np.square(spread, dtype=np.float64).mean()))
        std = np.maximum(spread, _LEAST_SPREAD * typical) if typical > 0 else np.ones_like(spread)
        return cls(centroids=centroids, std=std.astype(np.float32), bits=bits)

    def encode(self, rows: npt.NDArray[np.floating[Any]], *, threads: int | None = None) -> Encoded:
        """Encode rows ``[n, d]``. A row's encoding does not depend on the others."""
        codes = nearest(rows, self.centroids, threads=threads)
        if self.bits:
            values = self.centroids.values
            scales, packed = kernel.encode(np.asarray(rows, dtype=np.float32), codes, values, self, threads=threads)
        else:
            scales, packed = np.zeros(len(rows), dtype=np.float16), np.empty((len(rows), 0), dtype=np.uint8)
        return Encoded(codes=codes, scales=scales, residuals=packed)

    def decode(
        self,
        codes: npt.NDArray[np.uint16],
        scales: npt.NDArray[np.float16],
        residuals: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.float32]:
        """The rows that the encoding stands for, float32 ``[n, d]``; not normalized."""
        rows = self.centroids.values[codes]
        if self.bits:
            levels = self.levels * np.float32(self.level_scale)
            steps = levels[kernel.unpack(residuals, self.bits, self.dim)] * self.std
            rows += scales.astype(np.float32)[:, None] * steps
        return rows

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The codec as plain arrays, for :meth:`from_arrays`."""
        return {
            "centroids": self.centroids.rows,
            "centroid_scales": self.centroids.scales,
            "std": self.std,
            "bits": np.array(self.bits, dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ResidualCodec:
        """The codec of :meth:`arrays`.

        Raises:
            KeyError: An array is missing.
            ValueError: An array has another type or shape than a codec's.
        """
        centroids = Centroids(rows=arrays["centroids"], scales=arrays["centroid_scales"])
        return cls(centroids=centroids, std=arrays["std"], bits=int(arrays["bits"]))
