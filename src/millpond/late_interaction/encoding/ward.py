"""Ward's clustering of the rows of many short matrices at once, over cosine distances.

Two clusters that are each other's nearest are merged by every order of merging, since Ward's linkage is reducible
(Murtagh and Contreras, Algorithms for hierarchical clustering: an overview, 2012). So numpy merges all such pairs
together, in a few dozen rounds, of many matrices at a time. The compiled kernel merges them one by one, by height.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from millpond.native.library import portable

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

# Distances of the matrices that are clustered together: 16 MiB of float64.
_CELLS = 1 << 21
# Distances computed or compared at a time: 512 KiB of float64 stay in a core's cache.
_BLOCK = 1 << 16
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
    """
    for group in _groups(lengths):
        places = starts[group][:, None] + np.arange(lengths[group[0]])  # [b, n] row at each place of a matrix
        exists = np.arange(places.shape[1]) < lengths[group][:, None]
        rows = units[np.where(exists, places, starts[group][:, None])]  # [b, n, d]
        tree = _Tree(rows, exists, lengths[group] - clusters[group])
        tree.grow()
        first[places[exists]] = (starts[group][:, None] + tree.cut())[exists]


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
        self._nearest = np.zeros((count, longest), dtype=np.int64)  # [b, n] the nearest cluster
        self._near = np.full((count, longest), np.inf)  # [b, n] its distance

    def grow(self) -> None:
        """Merge, up to the cut at least."""
        library = portable()
        if library is None:
            self.grow_in_rounds()
            return
        count, longest = self._gone.shape
        left = self._merges - self._made  # equal rows are merged
        arrays = (self._distances, self._sizes, self._gone, left, self._parents, self._heights)
        workspace = np.empty(4 * longest)
        library.millpond_ward(*(array.ctypes.data for array in arrays), count, longest, workspace.ctypes.data)
        self._made = np.isfinite(self._heights).sum(axis=1)

    def grow_in_rounds(self) -> None:
        """As :meth:`grow`, without the compiled kernel."""
        self._find_nearest(*np.nonzero(self._sizes > 0))
        while True:
            self._lower_highest()
            matrices, left, right = self._pairs()
            if not len(matrices):
                return
            self._find_nearest(*self._merge(matrices, left, right))

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

    def _find_nearest(self, matrices: IndexArray, places: IndexArray) -> None:
        """Find the nearest cluster of those given."""
        step = max(1, _BLOCK // self._gone.shape[1])
        for begin in range(0, len(matrices), step):
            of, at = matrices[begin : begin + step], places[begin : begin + step]
            rows = self._distances[of, at]
            rows += self._gone[of]
            nearest = rows.argmin(axis=1)
            self._nearest[of, at] = nearest
            self._near[of, at] = rows[np.arange(len(rows)), nearest]

    def _lower_highest(self) -> None:
        """The cut is at most as high as enough of the merges that were made; their order by height is not known yet."""
        enough = np.flatnonzero((self._made >= self._merges) & (self._merges > 0))
        if len(enough):
            nth = self._merges[enough] - 1
            self._highest[enough] = np.sort(self._heights[enough], axis=1)[np.arange(len(enough)), nth]
        self._highest[self._merges == 0] = -1.0

    def _pairs(self) -> tuple[IndexArray, IndexArray, IndexArray]:
        """The clusters that are each other's nearest: ``(matrix, place, later place)`` of each pair."""
        places = np.arange(self._gone.shape[1])
        open_ = self._near <= np.minimum(self._highest, np.finfo(np.float64).max)[:, None]
        mutual = open_ & (np.take_along_axis(self._nearest, self._nearest, axis=1) == places)
        matrices, left = np.nonzero(mutual & (places < self._nearest))
        # Rounding may have made distances differ that are equal: then the nearest two are merged all the same.
        stuck = np.flatnonzero(open_.any(axis=1) & ~mutual.any(axis=1))
        if len(stuck):
            one = self._near[stuck].argmin(axis=1)
            other = self._nearest[stuck, one]
            height = self._near[stuck, one]
            left_stuck, right_stuck = np.minimum(one, other), np.maximum(one, other)
            self._nearest[stuck, left_stuck], self._near[stuck, left_stuck] = right_stuck, height
            matrices, left = np.concatenate((matrices, stuck)), np.concatenate((left, left_stuck))
        return matrices, left, self._nearest[matrices, left]

    def _merge(self, matrices: IndexArray, left: IndexArray, right: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Merge pairs of clusters; returns ``(matrix, place)`` of the clusters whose nearest is to be found anew."""
        heights = self._near[matrices, left]  # [pairs]
        self._parents[matrices, right], self._heights[matrices, right] = left, heights
        self._made += np.bincount(matrices, minlength=len(self._made))
        count, longest = self._gone.shape
        partner = np.tile(np.arange(longest), (count, 1))  # [b, n] the later cluster of a pair, at the earlier one
        partner[matrices, left] = right
        pair_heights = np.zeros((count, longest))
        pair_heights[matrices, left] = heights
        paired = np.zeros((count, longest), dtype=np.bool_)
        paired[matrices, left] = True
        rows = np.empty((len(matrices), longest))  # [pairs, n] distances of the merged clusters
        step = max(1, _BLOCK // longest)
        for begin in range(0, len(matrices), step):
            part = slice(begin, begin + step)
            rows[part] = self._merged_rows(
                matrices[part], left[part], right[part], heights[part], partner, pair_heights, paired
            )
        self._sizes[matrices, left] += self._sizes[matrices, right]
        self._sizes[matrices, right] = 0
        self._gone[matrices, right] = np.inf
        self._near[matrices, right] = np.inf
        if count == 1:
            self._distances[0, :, left] = rows
        else:
            self._distances[matrices, :, left] = rows
        self._distances[matrices, left] = rows
        return self._settle(matrices, left, right)

    def _merged_rows(
        self,
        matrices: IndexArray,
        left: IndexArray,
        right: IndexArray,
        heights: DoubleArray,
        partner: IndexArray,
        pair_heights: DoubleArray,
        paired: npt.NDArray[np.bool_],
    ) -> DoubleArray:
        """Distances ``[pairs, n]`` of merged clusters to all others, which may be merged too.

        Lance and Williams's update for Ward's linkage: of a cluster k to the union of i and j, with sizes n,
        ``((n_i + n_k) d_ik + (n_j + n_k) d_jk - n_k d_ij) / (n_i + n_j + n_k)``; d are squared distances.
        """
        sizes = self._sizes[matrices]  # [pairs, n]
        one, two = self._sizes[matrices, left][:, None], self._sizes[matrices, right][:, None]
        rows = (one + sizes) * self._distances[matrices, left]
        rows += (two + sizes) * self._distances[matrices, right]
        rows -= sizes * heights[:, None]
        rows /= one + two + sizes
        both = one + two
        if len(self._gone) == 1:
            others, theirs, height = np.flatnonzero(paired[0]), partner[0][paired[0]], pair_heights[0][paired[0]]
            first, second = rows[:, others], rows[:, theirs]
            size, other_size = sizes[:, others], sizes[:, theirs]
            joined = (size + both) * first + (other_size + both) * second - both * height
            rows[:, others] = joined / (size + other_size + both)
            return rows
        partners = partner[matrices]
        second, other_sizes = np.take_along_axis(rows, partners, axis=1), np.take_along_axis(sizes, partners, axis=1)
        joined = (sizes + both) * rows + (other_sizes + both) * second - both * pair_heights[matrices]
        joined /= sizes + other_sizes + both
        return np.where(paired[matrices], joined, rows)

    def _settle(self, matrices: IndexArray, left: IndexArray, right: IndexArray) -> tuple[IndexArray, IndexArray]:
        """``(matrix, place)`` of the clusters whose nearest was merged and is farther now, and of the merged ones."""
        union = np.full(self._gone.shape, -1, dtype=np.int64)
        union[matrices, left] = union[matrices, right] = left
        of, at = np.nonzero((np.take_along_axis(union, self._nearest, axis=1) >= 0) & (self._gone == 0))
        to = union[of, self._nearest[of, at]]
        merged = union[of, at] >= 0
        farther = self._distances[of, at, to] > self._near[of, at]
        self._nearest[of, at] = to  # also where it is farther now, and found anew
        again = ~merged & farther
        return np.concatenate((matrices, of[again])), np.concatenate((left, at[again]))


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
