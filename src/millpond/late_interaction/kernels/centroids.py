"""Centroids: the nearest one of each row, and the similarity of each to the tokens of a query."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.kernels.compiled import aligned, compiled, fields, run, thread_count
from millpond.support.cached_property import cached_property

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# A code is a uint16.
MAX_CENTROIDS = 65_536
# Centroids of a tile, and columns that a similarity matrix has a multiple of; those behind the query's tokens are 0.
TILE = 16

_LEVEL = 127  # largest int8 level
_SMALLEST = 1e-30  # a row without a larger number is 0: its scale would lose bits
_SMALLEST_GROUPED = 2_048  # centroids; fewer are all compared
_CENTROIDS_PER_GROUP = 64
_PROBES = 16  # groups searched for each row
_GROUP_ROUNDS = 4
_BLOCK = 1 << 22  # similarities computed at a time
_GROUP = 4  # columns of a row that are multiplied at once


class _NearestCall(ctypes.Structure):
    """``struct NearestCall`` of centroids.h."""

    _fields_ = fields(
        pointers="rows found members scales ids first_tile centers",
        integers="count dim groups probes threads next failed",
    )


class _SimilaritiesCall(ctypes.Structure):
    """``struct SimilaritiesCall`` of centroids.h."""

    _fields_ = fields(
        pointers="rows scales sums query query_scales out", integers="count dim tokens columns threads next failed"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Centroids:
    """Centroids on an int8 grid: the values are exactly ``rows * scales``, so that products with them are integer."""

    rows: npt.NDArray[np.int8]  # int8 `[K, d]`
    scales: FloatArray  # float32 `[K]`

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.dtype != np.int8 or not 0 < len(self.rows) <= MAX_CENTROIDS:
            raise ValueError(
                f"the centroids are {self.rows.dtype} {self.rows.shape}; they must be int8 [1 to {MAX_CENTROIDS}, d]"
            )
        if self.scales.shape != (len(self.rows),) or self.scales.dtype != np.float32:
            raise ValueError(f"scales are {self.scales.dtype} {self.scales.shape}, not float32 [{len(self.rows)}]")

    @classmethod
    def of(cls, values: FloatArray) -> Centroids:
        """Round float32 ``[K, d]`` to the grid."""
        rows, scales = int8_rows(values)
        return cls(rows=rows, scales=scales)

    def __len__(self) -> int:
        return len(self.rows)

    def extended(self, values: FloatArray) -> Centroids:
        """These centroids, whose codes stay as they are, and behind them float32 ``[k, d]``, rounded to the grid."""
        rows, scales = int8_rows(values)
        return Centroids(rows=np.concatenate((self.rows, rows)), scales=np.concatenate((self.scales, scales)))

    @property
    def dim(self) -> int:
        """Width of a centroid."""
        return int(self.rows.shape[1])

    @cached_property
    def values(self) -> FloatArray:
        """float32 ``[K, d]``, read-only."""
        values = self.rows * self.scales[:, None]
        values.flags.writeable = False
        return values

    @cached_property
    def groups(self) -> Groups | None:
        """The centroids in groups of similar ones; ``None`` where there are too few for that to pay."""
        return _group(self) if len(self) >= _SMALLEST_GROUPED else None

    @cached_property
    def sums(self) -> npt.NDArray[np.int32]:
        """int32 ``[K]``: the sum of each row, which the compiled kernels take off their products."""
        sums: npt.NDArray[np.int32] = self.rows.sum(axis=1, dtype=np.int32)
        return sums

    @cached_property
    def tiles(self) -> Tiles:
        """The centroids as the compiled kernel compares them, in one group where there are no groups."""
        groups = self.groups or Groups(
            centers=np.zeros((1, self.dim), dtype=np.float32),
            members=np.arange(len(self)),
            offsets=np.array([0, len(self)]),
        )
        return _tiles(self, groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Centroids, grouped around centers."""

    centers: FloatArray  # float32 `[G, d]`
    members: IndexArray  # int64 `[K]`: the centroids, group by group, ascending within one
    offsets: IndexArray  # int64 `[G + 1]` into `members`. No group is empty.


class Tiles(NamedTuple):
    """Groups of centroids, packed for the compiled kernel, 16 to a tile; a group's last one fills its last tile."""

    # uint8 `[tiles, ceil(d / 4), 16, 4]`, the numbers with 128 added; 0 in columns from the width on
    packed: npt.NDArray[np.uint8]
    scales: FloatArray  # float32 `[tiles * 16]`
    ids: npt.NDArray[np.uint16]  # uint16 `[tiles * 16]`: the centroid at each place
    first_tile: IndexArray  # int64 `[groups + 1]`
    centers: npt.NDArray[np.uint8]  # uint8, the centers packed like the centroids; all have one scale


def nearest(
    rows: npt.NDArray[np.floating[Any]], centroids: Centroids, *, threads: int | None = None
) -> npt.NDArray[np.uint16]:
    """The centroid with the largest inner product with each of ``n`` rows; of equal ones the first.

    With many centroids only those of the groups whose centers are nearest to the row are compared: of the rows of a
    real text collection that finds the nearest of all but a few percent, and for those one about as near.
    """
    found = np.empty(len(rows), dtype=np.uint16)
    kernel = compiled("nearest_centroids")
    if kernel is not None:
        tiles = centroids.tiles
        count = len(tiles.first_tile) - 1
        arrays = (np.ascontiguousarray(rows, dtype=np.float32), found, *tiles)
        sizes = (len(rows), centroids.dim, count, min(_PROBES, count), thread_count(threads))
        run(kernel, _NearestCall, arrays, *sizes)
        return found
    groups = centroids.groups
    wide = len(centroids) if groups is None else len(groups.centers)
    for begin, block in _blocks(rows, wide):
        picked = _nearest_of_all(block, centroids.values) if groups is None else _probe(block, centroids, groups)
        found[begin : begin + len(block)] = picked
    return found


def squared_distances(
    rows: npt.NDArray[np.floating[Any]], centroids: Centroids, codes: npt.NDArray[np.uint16]
) -> FloatArray:
    """The squared distance ``[n]`` of each row ``[n, d]`` from its centroid."""
    found = np.empty(len(rows), dtype=np.float32)
    for begin, block in _blocks(rows, centroids.dim):
        some = slice(begin, begin + len(block))
        residuals = block - centroids.values[codes[some]]
        found[some] = np.einsum("nd,nd->n", residuals, residuals)
    return found


@np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
def similarities(
    query: npt.NDArray[np.floating[Any]], centroids: Centroids, *, threads: int | None = None
) -> FloatArray:
    """The inner product of every centroid with every token of a query, the query ``[tokens, d]`` rounded to int8.

    Returns:
        float32 ``[K, columns]``: a column for each token, and columns of zeros up to a multiple of 16.
    """
    levels, scales = int8_rows(query)
    columns = -(-len(levels) // TILE) * TILE
    out = aligned((len(centroids), columns), np.float32)
    kernel = compiled("centroid_similarities")
    if kernel is not None:
        scales = np.concatenate((scales, np.zeros(columns - len(scales), dtype=np.float32)))
        arrays = (centroids.rows, centroids.scales, centroids.sums, levels, scales, out)
        sizes = (len(centroids), centroids.dim, len(levels), columns, thread_count(threads))
        run(kernel, _SimilaritiesCall, arrays, *sizes)
        return out
    out[:, len(levels) :] = 0
    # Integers below 2^24 are exact in float32: the product is that of the compiled kernel.
    products = centroids.rows.astype(np.float32) @ levels.astype(np.float32).T
    products *= scales
    products *= centroids.scales[:, None]
    out[:, : len(levels)] = products
    return out


def int8_rows(values: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Rows of int8 levels, and the float32 scale of each: the largest number of a row becomes 127."""
    # The levels have the order of the values in memory, and the kernels read row after row.
    values = np.ascontiguousarray(values, dtype=np.float32)
    largest = np.abs(values).max(axis=1, initial=0)
    scales = np.where(largest > _SMALLEST, largest / _LEVEL, 1).astype(np.float32)
    return np.rint(values / scales[:, None]).astype(np.int8), scales


def _blocks(rows: npt.NDArray[np.floating[Any]], wide: int) -> Iterator[tuple[int, FloatArray]]:
    """Rows in blocks that have at most ``_BLOCK`` similarities to ``wide`` centroids."""
    step = max(1, _BLOCK // wide)
    for begin in range(0, len(rows), step):
        yield begin, np.asarray(rows[begin : begin + step], dtype=np.float32)


@np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
def _nearest_of_all(rows: FloatArray, values: FloatArray) -> IndexArray:
    found: IndexArray = (rows @ values.T).argmax(axis=1)
    return found


@np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
def _probe(rows: FloatArray, centroids: Centroids, groups: Groups) -> IndexArray:
    """The nearest centroid among those of the groups nearest to each row."""
    probes = min(_PROBES, len(groups.centers))
    group_of = np.argpartition(-(rows @ groups.centers.T), probes - 1, axis=1)[:, :probes]  # [n, probes]
    order = np.argsort(group_of, axis=None, kind="stable")
    bounds = np.searchsorted(group_of.ravel()[order], np.arange(len(groups.centers) + 1))
    order //= probes  # the row of each (row, probe)
    best = np.full(len(rows), -np.inf, dtype=np.float32)
    found = np.zeros(len(rows), dtype=np.int64)
    for group in np.flatnonzero(np.diff(bounds)):
        some = order[bounds[group] : bounds[group + 1]]
        members = groups.members[groups.offsets[group] : groups.offsets[group + 1]]
        products = rows[some] @ centroids.values[members].T
        picked = products.argmax(axis=1)
        similarity, picked = products[np.arange(len(some)), picked], members[picked]
        better = similarity > best[some]
        best[some[better]] = similarity[better]
        found[some[better]] = picked[better]
    return found


def _tiles(centroids: Centroids, groups: Groups) -> Tiles:
    counts = np.diff(groups.offsets)
    tiles = -(-counts // TILE)
    first_tile = np.concatenate(([0], np.cumsum(tiles))).astype(np.int64)
    # The number of each place in its group; those behind a group's last member repeat it.
    place = np.arange(first_tile[-1] * TILE) - np.repeat(first_tile[:-1] * TILE, tiles * TILE)
    place = np.minimum(place, np.repeat(counts - 1, tiles * TILE))
    ids = groups.members[np.repeat(groups.offsets[:-1], tiles * TILE) + place]
    centers = groups.centers
    largest = float(np.abs(centers).max(initial=0)) or 1.0
    rows = np.zeros((-(-len(centers) // TILE) * TILE, centroids.dim), dtype=np.int8)
    rows[: len(centers)] = np.rint(centers * np.float32(_LEVEL / largest))
    packed = _packed(centroids.rows[ids])
    return Tiles(packed, centroids.scales[ids], ids.astype(np.uint16), first_tile, _packed(rows))


def _packed(rows: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """int8 ``[n, d]``, with n a multiple of 16, as tiles."""
    count, dim = rows.shape
    groups = -(-dim // _GROUP)
    padded = np.zeros((count, groups * _GROUP), dtype=np.uint8)
    padded[:, :dim] = rows.view(np.uint8) ^ np.uint8(128)
    return np.ascontiguousarray(padded.reshape(-1, TILE, groups, _GROUP).transpose(0, 2, 1, 3))


def _group(centroids: Centroids) -> Groups:
    """Groups by spherical k-means of the centroids themselves, from centers spread evenly over them."""
    values = centroids.values
    count = len(centroids) // _CENTROIDS_PER_GROUP
    centers = values[np.linspace(0, len(values) - 1, count).astype(np.int64)]
    for _ in range(_GROUP_ROUNDS):
        owner = np.concatenate([_nearest_of_all(block, centers) for _, block in _blocks(values, count)])
        taken, owner = np.unique(owner, return_inverse=True)
        sums = np.zeros((len(taken), centroids.dim), dtype=np.float32)
        np.add.at(sums, owner, values)
        centers = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
        count = len(taken)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=count))))
    return Groups(centers=centers, members=np.argsort(owner, kind="stable"), offsets=offsets)
