"""Rankings by exact MaxSim in float32, and how near another ranking is to them: recall and nDCG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peers.token_states import TokenStates

Indices = npt.NDArray[np.int64]
BLOCK = 4096  # token states in one matrix product: with 200 queries, 100 MB of similarities


def exact_scores(states: TokenStates, queries: int) -> npt.NDArray[np.float32]:
    """``[q, n]`` float32 MaxSim scores of the first queries: for each row of a query its best product, summed."""
    asked = states.queries[:queries]
    rows = np.concatenate(asked).T  # [d, rows of all queries]
    starts = np.cumsum([0, *(len(query) for query in asked[:-1])])
    scores = np.full((len(states), len(asked)), -np.inf, np.float32)
    first = 0
    while first < len(states):
        # Whole documents, of at most BLOCK tokens together, or one.
        last = max(int(np.searchsorted(states.offsets, states.offsets[first] + BLOCK, "right")) - 1, first + 1)
        block = np.asarray(states.flat[states.offsets[first] : states.offsets[last]], np.float32)
        filled = np.flatnonzero(np.diff(states.offsets[first : last + 1]))  # documents without tokens keep -inf
        if len(filled):
            begins = (states.offsets[first:last] - states.offsets[first])[filled]
            best = np.maximum.reduceat(block @ rows, begins, axis=0)  # [documents, rows]
            scores[first + filled] = np.add.reduceat(best, starts, axis=1)
        first = last
    return scores.T


def exact_ranking(states: TokenStates, queries: int, *, folder: Path | None = None, k: int = 10) -> Indices:
    """``[q, k]`` documents by exact scores, best first; kept as a file in ``folder``."""
    path = folder / f"{states.name}.exact{queries}.npy" if folder is not None else None
    if path is not None and path.is_file():
        kept: Indices = np.load(path)
        return kept
    ranking = top(exact_scores(states, queries), k)
    if path is not None:
        np.save(path, ranking)
    return ranking


def top(scores: npt.NDArray[np.float32], k: int) -> Indices:
    """``[q, k]`` columns of ``scores [q, n]``, best first; for equal scores the lower index first."""
    found: Indices = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return found


def recall(found: Sequence[Sequence[int]], exact: Indices, k: int = 10) -> float:
    """Mean share of the exact best ``k`` that are among the first ``k`` found."""
    pairs = zip(found, exact.tolist(), strict=False)
    return float(np.mean([len(set(a[:k]) & set(b[:k])) / len(b[:k]) for a, b in pairs]))


def ndcg(found: Sequence[Sequence[int]], grades: Sequence[Mapping[int, int]], k: int = 10) -> float:
    """Mean nDCG of the queries that have a relevant document, with the grade itself as the gain (as in trec_eval)."""
    values = []
    for ranking, graded in zip(found, grades, strict=False):
        best = _discounted(sorted(graded.values(), reverse=True)[:k])
        if best > 0:
            values.append(_discounted([graded.get(int(document), 0) for document in ranking[:k]]) / best)
    return float(np.mean(values))


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))
