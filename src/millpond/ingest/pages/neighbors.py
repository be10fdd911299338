"""Exact nearest neighbours by dot product, and the recall of a cheaper search against them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from millpond.vectors import matryoshka

FloatArray = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

# Scores that are in memory at a time.
_BLOCK_SCORES = 1 << 23


def nearest(queries: FloatArray, rows: npt.NDArray[np.generic], k: int) -> Indices:
    """``[q, min(k, n)]``: the rows of the highest dot products, best first; of equal ones the lower index first.

    ``rows [n, d]`` of any number type are converted block by block, so a memory map may be passed.
    """
    best = np.empty((len(queries), 0), np.int64)
    best_scores = np.empty((len(queries), 0), np.float32)
    block = max(1, _BLOCK_SCORES // max(len(queries), 1))
    for start in range(0, len(rows), block):
        scores = queries @ rows[start : start + block].astype(np.float32, copy=False).T  # [q, block]
        found = top(scores, k)  # [q, k]
        scores = np.concatenate([best_scores, np.take_along_axis(scores, found, axis=1)], axis=1)
        indices = np.concatenate([best, found + start], axis=1)
        # Stable: of equal scores those of the earlier blocks, which have the lower indices, stay in front.
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best, best_scores = np.take_along_axis(indices, order, axis=1), np.take_along_axis(scores, order, axis=1)
    return best


def top(scores: npt.NDArray[np.float32], k: int) -> Indices:
    """``[q, min(k, n)]``: columns of the highest ``scores [q, n]``, best first; of equal ones the lower index first."""
    n = scores.shape[1]
    if k < n:
        least = -np.partition(-scores, k - 1, axis=1)[:, k - 1 : k]  # [q, 1], the score of the k-th
        above, equal = scores > least, scores == least
        free = k - above.sum(axis=1, keepdims=True)
        kept = above | (equal & (np.cumsum(equal, axis=1) <= free))
        columns = np.nonzero(kept)[1].reshape(len(scores), k)  # ascending
    else:
        columns = np.broadcast_to(np.arange(n), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, columns, axis=1), axis=1, kind="stable")
    result: Indices = np.take_along_axis(columns, order, axis=1).astype(np.int64, copy=False)
    return result


def recall(found: Indices, expected: Indices) -> float:
    """The share of ``expected [q, k]`` that is among ``found [q, k]``, in any order; the mean of all queries."""
    if not expected.size:
        return 1.0
    return float((found[:, :, None] == expected[:, None, :]).any(axis=1).mean())


def recall_by_width(
    rows: FloatArray, widths: Sequence[int], *, k: int = 10, queries: int = 200, seed: int = 0
) -> dict[int, float]:
    """How many of a row's ``k`` nearest rows at full width are found among rows cut to each width."""
    n = len(rows)
    if n < 2:
        return {}
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:queries])
    k = min(k, n - 1)

    def neighbors(width: int) -> Indices:
        cut = matryoshka.cut(rows, width, normalize=True)
        scores = cut[chosen] @ cut.T  # [queries, n]
        scores[np.arange(len(chosen)), chosen] = -np.inf
        return top(scores, k)

    exact = neighbors(rows.shape[1])
    return {width: recall(neighbors(width), exact) for width in sorted(set(widths))}


def plotted_widths(native: int, declared: Sequence[int] | None, stored: Sequence[int] = ()) -> list[int]:
    """The widths to measure: those that the model declares (else powers of two from 32), the stored ones, the full."""
    powers = [1 << power for power in range(5, native.bit_length()) if 1 << power < native]
    return sorted({width for width in (*(declared or powers), *stored) if width < native} | {native})
