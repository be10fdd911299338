"""Centroids: the nearest one of each row, and the similarity of each to the tokens of a query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# A code is a uint16.
MAX_CENTROIDS = 65_536
# Columns of a similarity matrix come in vectors of this many; those behind the query's tokens are 0.
LANES = 16

_LEVEL = 127  # largest int8 level
_SMALLEST_GROUPED = 2_048  # centroids; fewer are all compared
_CENTROIDS_PER_GROUP = 64
_PROBES = 12  # groups searched for each row
_GROUP_ROUNDS = 4
_BLOCK = 1 << 22  # similarities computed at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Centroids:
    """Centroids on an int8 grid: the values are exactly ``rows * scales``, so that products with them are integer.

    Attributes:
        rows: int8 ``[K, d]``.
        scales: float32 ``[K]``.
    """

    rows: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.dtype != np.int8 or not 0 < len(self.rows) <= MAX_CENTROIDS:
            raise ValueError(
                f"the centroids are {self.rows.dtype} {self.rows.shape}; they must be int8 [1 to {MAX_CENTROIDS}, d]"
            )
        if self.scales.shape != (len(self.rows),) or self.scales.dtype != np.float32:
            raise ValueError(f"scales are {self.scales.dtype} {self.scales.shape}, not float32 [{len(self.rows)}]")

    @classmethod
    def of(cls, values: npt.NDArray[np.float32]) -> Centroids:
        """Round float32 ``[K, d]`` to the grid."""
        rows, scales = int8_rows(values)
        return cls(rows=rows, scales=scales)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Width of a centroid."""
        return int(self.rows.shape[1])

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """float32 ``[K, d]``, read-only."""
        values = self.rows * self.scales[:, None]
        values.flags.writeable = False
        return values

    @cached_property
    def groups(self) -> Groups | None:
        """The centroids in groups of similar ones; ``None`` where there are too few for that to pay."""
        return _group(self) if len(self) >= _SMALLEST_GROUPED else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Centroids, grouped around centers.

    Attributes:
        centers: float32 ``[G, d]``.
        members: int64 ``[K]``: the centroids, group by group, ascending within one.
        offsets: int64 ``[G + 1]`` into ``members``. No group is empty.
    """

    centers: npt.NDArray[np.float32]
    members: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def nearest(
    rows: npt.NDArray[np.floating[Any]], centroids: Centroids, *, exhaustive: bool = False, threads: int | None = None
) -> npt.NDArray[np.uint16]:
    """The centroid with the largest inner product with each row; of equal ones the first.

    With many centroids only those of the groups whose centers are nearest to the row are compared: of the rows of a
    real text collection that finds the nearest of all but a few percent, and for those one about as near.

    Args:
        rows: ``[n, d]``.
        centroids: The centroids.
        exhaustive: Compare every centroid.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        uint16 ``[n]``.
    """
    groups = None if exhaustive else centroids.groups
    found = np.empty(len(rows), dtype=np.uint16)
    wide = len(centroids) if groups is None else len(groups.centers)
    for begin, block in _blocks(rows, wide):
        picked = _nearest_of_all(block, centroids.values) if groups is None else _probe(block, centroids, groups)
        found[begin : begin + len(block)] = picked
    return found


def similarities(
    query: npt.NDArray[np.floating[Any]], centroids: Centroids, *, threads: int | None = None
) -> npt.NDArray[np.float32]:
    """The inner product of every centroid with every token of a query, the query rounded to int8.

    Args:
        query: ``[tokens, d]``.
        centroids: The centroids.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        float32 ``[K, columns]``: a column for each token, and columns of zeros up to a multiple of 16.
    """
    levels, scales = int8_rows(query)
    columns = -(-len(levels) // LANES) * LANES
    out = np.zeros((len(centroids), columns), dtype=np.float32)
    # Integers below 2^24 are exact in float32: the product is that of the compiled kernel.
    products = torch.from_numpy(centroids.rows).float() @ torch.from_numpy(levels.astype(np.float32)).T
    products *= torch.from_numpy(scales)
    products *= torch.from_numpy(centroids.scales)[:, None]
    out[:, : len(levels)] = products.numpy()
    return out


def int8_rows(values: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rows of int8 levels, and the float32 scale of each: the largest number of a row becomes 127."""
    values = np.asarray(values, dtype=np.float32)
    largest = np.abs(values).max(axis=1, initial=0)
    scales = np.where(largest > 0, largest / _LEVEL, 1).astype(np.float32)
    return np.rint(values / scales[:, None]).astype(np.int8), scales


def _blocks(rows: npt.NDArray[np.floating[Any]], wide: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Rows in blocks that have at most ``_BLOCK`` similarities to ``wide`` centroids."""
    step = max(1, _BLOCK // wide)
    for begin in range(0, len(rows), step):
        yield begin, np.asarray(rows[begin : begin + step], dtype=np.float32)


def _nearest_of_all(rows: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    products = _tensor(rows) @ _tensor(values).T
    # torch.argmax does not promise the first of equal ones.
    found: npt.NDArray[np.int64] = products.numpy().argmax(axis=1)
    return found


def _probe(rows: npt.NDArray[np.float32], centroids: Centroids, groups: Groups) -> npt.NDArray[np.int64]:
    """The nearest centroid among those of the groups nearest to each row."""
    block = _tensor(rows)
    probes = min(_PROBES, len(groups.centers))
    group_of = (block @ _tensor(groups.centers).T).topk(probes, dim=1, sorted=False).indices.numpy()  # [n, probes]
    order = np.argsort(group_of, axis=None, kind="stable")
    bounds = np.searchsorted(group_of.ravel()[order], np.arange(len(groups.centers) + 1))
    order //= probes  # the row of each (row, probe)
    best = np.full(len(rows), -np.inf, dtype=np.float32)
    found = np.zeros(len(rows), dtype=np.int64)
    values = _tensor(centroids.values)
    for group in np.flatnonzero(np.diff(bounds)):
        some = order[bounds[group] : bounds[group + 1]]
        members = groups.members[groups.offsets[group] : groups.offsets[group + 1]]
        products = (block[torch.from_numpy(some)] @ values[torch.from_numpy(members)].T).numpy()
        picked = products.argmax(axis=1)
        similarity, picked = products[np.arange(len(some)), picked], members[picked]
        better = (similarity > best[some]) | ((similarity == best[some]) & (picked < found[some]))
        best[some[better]] = similarity[better]
        found[some[better]] = picked[better]
    return found


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


def _tensor(rows: npt.NDArray[np.float32]) -> torch.Tensor:
    """A float32 tensor, copied only if torch cannot use the memory (read-only, for example)."""
    return torch.from_numpy(np.require(rows, dtype=np.float32, requirements=["C", "W"]))
