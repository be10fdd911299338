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
        lengths: ``[n]`` rows of each matrix, at least two.
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
        cluster = _clusters(rows, exists, lengths[group] - clusters[group], library)
        first[places[exists]] = (starts[group][:, None] + cluster)[exists]


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
        distances = np.clip(1 - units[rows] @ units[rows].T, 0, 2)
        equal = np.unique(units[rows], axis=0, return_inverse=True)[1].reshape(-1)
        distances[equal[:, None] == equal] = 0  # whatever their cosine rounds to
        labels = fcluster(linkage(distances[np.triu_indices(length, 1)], "ward"), count, "maxclust")
        _, places, cluster = np.unique(labels, return_index=True, return_inverse=True)
        first[rows] = start + places[cluster]


def _groups(lengths: IndexArray) -> Iterator[IndexArray]:
    """Indices of matrices of about equal length, the longest first, as many as are clustered together."""
    order = np.argsort(-lengths, kind="stable")
    begin = 0
    while begin < len(order):
        end = begin + max(1, _CELLS // int(lengths[order[begin]]) ** 2)
        yield order[begin:end]
        begin = end


def _clusters(rows: FloatArray, exists: npt.NDArray[np.bool_], merges: IndexArray, library: CDLL) -> IndexArray:
    """``[b, n]``: the place of the first row of each row's cluster, by the compiled kernel.

    Distances and heights are squared.

    Args:
        rows: ``[b, n, d]`` unit rows.
        exists: ``[b, n]`` which places have a row.
        merges: ``[b]`` number of merges below the cut.
        library: The compiled functions.
    """
    count, longest, _ = rows.shape
    parents = np.tile(np.arange(longest), (count, 1))  # [b, n] the place that a cluster was merged into
    heights = np.full((count, longest), np.inf)  # [b, n] of that merge; infinite: none
    sizes = exists.astype(np.float64)  # [b, n] rows of the cluster; 0: none
    _merge_equal(rows, exists, parents, heights, sizes)
    left = merges - np.isfinite(heights).sum(axis=1)
    gone = np.where(sizes > 0, 0.0, np.inf)  # [b, n] added to distances: their columns are stale
    arrays = (_distances(rows, sizes), sizes, gone, left, parents, heights)
    workspace = np.empty(4 * longest)
    library.millpond_ward(*(array.ctypes.data for array in arrays), count, longest, workspace.ctypes.data)
    # All merges up to the height that leaves few enough clusters.
    last = np.sort(heights, axis=1)[np.arange(count), np.maximum(merges - 1, 0)]
    merged = np.isfinite(heights) & (heights <= np.where(merges > 0, last, -1.0)[:, None])
    places = np.where(merged, parents, np.arange(longest))
    while not np.array_equal(above := np.take_along_axis(places, places, axis=1), places):
        places = above
    return places


def _merge_equal(
    rows: FloatArray, exists: npt.NDArray[np.bool_], parents: IndexArray, heights: DoubleArray, sizes: DoubleArray
) -> None:
    """Merge equal rows at height 0: all are nearest to the first, and would be merged with it one in each round."""
    matrices, places = np.nonzero(exists)
    words = np.ascontiguousarray(rows[matrices, places]).view(np.uint32).astype(np.uint64)  # [rows, d]
    weights = np.random.Generator(np.random.PCG64(0)).integers(1 << 63, size=words.shape[1], dtype=np.uint64)
    hashes = (words * (weights * np.uint64(2) + np.uint64(1))).sum(axis=1, dtype=np.uint64)
    order = np.lexsort((places, hashes, matrices))
    matrices, places, hashes = matrices[order], places[order], hashes[order]
    same = (matrices[1:] == matrices[:-1]) & (hashes[1:] == hashes[:-1])
    near = np.flatnonzero(same)
    same[near] = (rows[matrices[near], places[near]] == rows[matrices[near + 1], places[near + 1]]).all(axis=1)
    head = np.maximum.accumulate(np.where(np.concatenate(([True], ~same)), np.arange(len(places)), 0))
    later = np.flatnonzero(head != np.arange(len(places)))
    parents[matrices[later], places[later]] = places[head[later]]
    heights[matrices[later], places[later]] = 0
    np.add.at(sizes, (matrices[later], places[head[later]]), 1)
    sizes[matrices[later], places[later]] = 0


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
