"""Spherical k-means: the centroids of a collection's token vectors."""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.kernels.centroids import MAX_CENTROIDS, Centroids, nearest

# Rows of the sample for each centroid.
POINTS_PER_CENTROID = 32
_ROUNDS = 3


def centroid_count(tokens: int) -> int:
    """Centroids for a collection: 2^floor(log2(8 sqrt(tokens))), at most 65,536 and at most one a token."""
    if tokens < 1:
        return 1
    return min(1 << (isqrt(64 * tokens).bit_length() - 1), MAX_CENTROIDS, tokens)


def sample_count(tokens: int) -> int:
    """Rows to train the centroids of a collection of ``tokens`` on."""
    return min(tokens, POINTS_PER_CENTROID * centroid_count(tokens))


def train(
    sample: npt.NDArray[np.float32], k: int, *, seed: int = 0, threads: int | None = None
) -> npt.NDArray[np.float32]:
    """Centroids of unit length, float32 ``[min(k, n), d]``; one without points moves to a random point.

    Args:
        sample: ``[n, d]``, L2-normalized.
        k: Centroids.
        seed: The same seed, sample and ``k`` give the same centroids.
        threads: Most threads; ``None`` is the number of this process.
    """
    random = np.random.default_rng(seed)
    k = min(k, len(sample), MAX_CENTROIDS)
    centroids = np.asarray(sample[np.sort(random.choice(len(sample), k, replace=False))], dtype=np.float32)
    for _ in range(_ROUNDS):
        owner = nearest(sample, Centroids.of(centroids), threads=threads)
        centroids = _means(sample, owner, k)
        empty = np.flatnonzero(~centroids.any(axis=1))
        centroids[empty] = sample[random.integers(len(sample), size=len(empty))]
    # Similar centroids side by side: the tokens of a document are similar, and so share cache lines in a scan.
    groups = Centroids.of(centroids).groups
    return centroids if groups is None else centroids[groups.members]


def _means(sample: npt.NDArray[np.float32], owner: npt.NDArray[np.uint16], k: int) -> npt.NDArray[np.float32]:
    """The normalized sum of each centroid's points; zeros for one without points."""
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=k)
    taken = np.flatnonzero(counts)
    starts = np.cumsum(counts)[taken] - counts[taken]
    means = np.zeros((k, sample.shape[1]), dtype=np.float32)
    means[taken] = np.add.reduceat(sample[order], starts, axis=0)
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)
    return means
