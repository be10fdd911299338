"""Ward's clustering of the rows of many short matrices at once, over cosine distances."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import numpy as np
import numpy.typing as npt

from millpond.errors import MissingExtraError
from millpond.native.library import portable

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

# Distances of the matrices that are clustered together: 16 MiB of float64.
_CELLS = 1 << 21
# Cosines computed at a time: 1 MiB of float32. Products of fewer rows are slower.
_PRODUCTS = 1 << 18


def ward_clusters(
    units: FloatArray, starts: IndexArray, lengths: IndexArray, clusters: IndexArray, first: IndexArray
) -> None:
    """Cluster the rows of each matrix.

    Distances are one minus the cosine, and grow by Ward's formula, as if they were Euclidean; the tree of merges is cut
    where at most so many clusters are left, as scipy's ``fcluster(linkage(distances, "ward"), clusters, "maxclust")``.

    Args:
        units: ``[total, d]`` unit rows of all matrices.
        starts: ``[n]`` first row of each matrix.
        lengths: ``[n]`` rows of each matrix, at least one.
        clusters: ``[n]`` how many clusters each matrix shall have, from 1; fewer, if merges at the cut are equal.
        first: ``[total]`` gets the first row of each row's cluster.

    Raises:
        MissingExtraError: There is neither the compiled kernel nor scipy.
    """
    library = portable()
    if library is None:
        _cluster_by_scipy(units, starts, lengths, clusters, first)
        return
    for group in _groups(lengths):
        places = starts[group][:, None] + np.arange(lengths[group[0]])  # [b, n] row at each place of a matrix
        exists = np.arange(places.shape[1]) < lengths[group][:, None]
        rows = units[np.where(exists, places, starts[group][:, None])]  # [b, n, d]
        tree = _Tree(rows, exists, lengths[group] - clusters[group])
        tree.grow(library)
        first[places[exists]] = (starts[group][:, None] + tree.cut())[exists]


def _cluster_by_scipy(
    units: FloatArray, starts: IndexArray, lengths: IndexArray, clusters: IndexArray, first: IndexArray
) -> None:
    """As :func:`ward_clusters`, without the compiled kernel."""
    try:
        from scipy.cluster.hierarchy import fcluster, linkage
    except ImportError:
        raise MissingExtraError(
            "token pooling needs millpond's compiled kernels or scipy; install with: pip install 'millpond[pooling]'"
        ) from None
    for start, length, count in zip(starts.tolist(), lengths.tolist(), clusters.tolist(), strict=True):
        rows = slice(start, start + length)
        first[rows] = start
        if length > 1:
            distances = np.clip(1 - units[rows] @ units[rows].T, 0, 2)
            equal = np.unique(units[rows], axis=0, return_inverse=True)[1].reshape(-1)
            distances[equal[:, None] == equal] = 0  # whatever their cosine rounds to
            labels = fcluster(linkage(distances[np.triu_indices(length, 1)], "ward"), count, "maxclust")
            _, places, cluster = np.unique(labels, return_index=True, return_inverse=True)
            first[rows] += places[cluster]


def _groups(lengths: IndexArray) -> Iterator[IndexArray]:
    """Indices of matrices of about equal length, the longest first, as many as are clustered together."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        end = begin + max(1, _CELLS // int(lengths[order[begin]]) ** 2)
        yield order[begin:end]
        begin = end


class _Tree:
    """The merges of ``b`` matrices of at most ``n`` rows. Distances and heights are squared.

    A cluster has the place of its first row. Merges above the cut are left out.
    """

    def __init__(self, rows: FloatArray, exists: npt.NDArray[np.bool_], merges: IndexArray) -> None:
        """Clusters of one row each, or of equal rows.

        Args:
            rows: ``[b, n, d]`` unit rows.
            exists: ``[b, n]`` which places have a row.
            merges: ``[b]`` number of merges below the cut.
        """
        count, longest, _ = rows.shape
        self._merges = merges
        self._made = np.zeros(count, dtype=np.int64)
        self._parents = np.tile(np.arange(longest), (count, 1))  # [b, n] the place that a cluster was merged into
        self._heights = np.full((count, longest), np.inf)  # [b, n] of that merge; infinite: none
        self._highest = np.full(count, np.inf)  # [b] no merge above this height is below the cut
        self._sizes = exists.astype(np.float64)  # [b, n] rows of the cluster; 0: none
        self._merge_equal(rows, exists)
        self._distances = _distances(rows, self._sizes)  # [b, n, n]
        self._gone = np.where(self._sizes > 0, 0.0, np.inf)  # [b, n] added to distances: their columns are stale

    def grow(self, library: CDLL) -> None:
        """Merge by the compiled kernel, up to the cut."""
        count, longest = self._gone.shape
        left = self._merges - self._made  # equal rows are merged
        arrays = (self._distances, self._sizes, self._gone, left, self._parents, self._heights)
        workspace = np.empty(4 * longest)
        library.millpond_ward(*(array.ctypes.data for array in arrays), count, longest, workspace.ctypes.data)
        self._made = np.isfinite(self._heights).sum(axis=1)

    def cut(self) -> IndexArray:
        """``[b, n]`` place of the cluster of each row: all merges up to the height that leaves few enough clusters."""
        self._lower_highest()
        merged = self._heights <= np.where(self._merges > 0, self._highest, -1.0)[:, None]
        places = np.where(merged & np.isfinite(self._heights), self._parents, np.arange(merged.shape[1]))
        while not np.array_equal(above := np.take_along_axis(places, places, axis=1), places):
            places = above
        return places

    def _merge_equal(self, rows: FloatArray, exists: npt.NDArray[np.bool_]) -> None:
        """Merge equal rows at height 0: all are nearest to the first, and would be merged with it one in each round."""
        matrices, places = np.nonzero(exists)
        words = np.ascontiguousarray(rows[matrices, places]).view(np.uint32).astype(np.uint64)  # [rows, d]
        weights = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=words.shape[1], dtype=np.uint64)
        hashes = (words * (weights * np.uint64(2) + np.uint64(1))).sum(axis=1, dtype=np.uint64)
        order = np.lexsort((places, hashes, matrices))
        matrices, places = matrices[order], places[order]
        same = (matrices[1:] == matrices[:-1]) & (hashes[order][1:] == hashes[order][:-1])
        near = np.flatnonzero(same)
        same[near] = (rows[matrices[near], places[near]] == rows[matrices[near + 1], places[near + 1]]).all(axis=1)
        head = np.maximum.accumulate(np.where(np.concatenate(([True], ~same)), np.arange(len(places)), 0))
        later = np.flatnonzero(head != np.arange(len(places)))
        self._parents[matrices[later], places[later]] = places[head[later]]
        self._heights[matrices[later], places[later]] = 0
        np.add.at(self._sizes, (matrices[later], places[head[later]]), 1)
        self._sizes[matrices[later], places[later]] = 0
        self._made += np.bincount(matrices[later], minlength=len(self._made))

    def _lower_highest(self) -> None:
        """The cut is at most as high as enough of the merges that were made; their order by height is not known yet."""
        enough = np.flatnonzero((self._made >= self._merges) & (self._merges > 0))
        if len(enough):
            nth = self._merges[enough] - 1
            self._highest[enough] = np.sort(self._heights[enough], axis=1)[np.arange(len(enough)), nth]
        self._highest[self._merges == 0] = -1.0


def _distances(rows: FloatArray, sizes: DoubleArray) -> DoubleArray:
    """``[b, n, n]`` squared distances between clusters of equal rows; infinite from a cluster to itself."""
    count, longest, _ = rows.shape
    distances = np.empty((count, longest, longest))
    step = max(1, _PRODUCTS // longest)
    for matrix, unit, size in zip(distances, rows, sizes, strict=True):
        columns = np.ascontiguousarray(unit.T)  # a product with a transposed view takes longer
        for begin in range(0, longest, step):
            cosines = unit[begin : begin + step] @ columns
            np.subtract(np.float32(1), cosines, out=cosines)
            np.clip(cosines, 0, 2, out=cosines)
            block = matrix[begin : begin + step]
            np.multiply(cosines, cosines, out=block, dtype=np.float64)
        if size.max() > 1:  # Ward's distance of clusters whose rows are equal
            matrix *= 2 * size[:, None] * size / np.maximum(size[:, None] + size, 1)
        np.fill_diagonal(matrix, np.inf)
    return distances
