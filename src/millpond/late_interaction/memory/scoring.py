"""Scoring: the best documents of a snapshot for a query, all of them compared or those that a scan of codes keeps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.index.documents import SEARCH_TURNS, Hit, Search
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.kernels.compiled import thread_count
from millpond.late_interaction.kernels.scan import Codes, best_first, candidates_of, table
from millpond.late_interaction.memory.blocks import IndexArray, View
from millpond.late_interaction.memory.store import Snapshot
from millpond.vectors.ragged import Ragged

# Documents that the codes keep for exact scoring: so many, or so many for each hit.
_CANDIDATES, _CANDIDATES_PER_HIT = 1_024, 20
# Scores computed before the best are taken: 64 MiB of float32.
_SCORES = 1 << 24


def search(
    snapshot: Snapshot,
    numbers: Mapping[int, Sequence[int]] | None,
    queries: Ragged,
    options: Search,
    *,
    threads: int | None,
) -> list[list[Hit]]:
    """The best documents for each query, best first; of equal ones the one that was added earlier.

    Args:
        snapshot: The documents.
        numbers: Numbers of the documents that the search names, by block; ``None`` if it names none.
        queries: Matrices ``[tokens_i, d]``.
        options: The search.
        threads: Most threads; ``None`` is the number of this process.
    """
    selections = [_Selection.of(view, options, numbers) for view in snapshot.views]
    selections = [selection for selection in selections if len(selection)]
    if not selections:
        return [[] for _ in queries]
    keep, most = options.candidates or max(_CANDIDATES, _CANDIDATES_PER_HIT * options.k), thread_count(threads)
    scans = snapshot.centroids is not None and not options.exact and sum(map(len, selections)) > keep
    step = 1 if scans else max(1, _SCORES // sum(map(len, selections)))  # queries at a time
    results: list[list[Hit]] = []
    for first in range(0, len(queries), step):
        some = Ragged.from_matrices(queries[first : first + step], width=queries.flat.shape[1])
        with SEARCH_TURNS.turn(most) as share:
            kept = _scanned(some.flat, snapshot, selections, keep, share) if scans and len(some.flat) else selections
            results += _best_of(some, kept, options.k, share)
    return results


def _scanned(
    query: npt.NDArray[np.float32], snapshot: Snapshot, selections: Sequence[_Selection], keep: int, threads: int
) -> list[_Selection]:
    """The ``keep`` documents whose codes match a query best."""
    assert snapshot.centroids is not None
    found = candidates_of(
        table(similarities(query, snapshot.centroids, threads=threads), query),
        [selection.codes() for selection in selections],
        keep,
        threads=threads,
    )
    return [
        replace(selection, documents=documents)
        for selection, documents in zip(selections, found, strict=True)
        if len(documents)
    ]


def _best_of(queries: Ragged, selections: Sequence[_Selection], k: int, threads: int) -> list[list[Hit]]:
    """The best of the selected documents for a few queries."""
    if not len(queries.flat):
        return [[] for _ in queries]
    starts = np.cumsum([0, *(len(selection) for selection in selections)])
    scores = np.concatenate([selection.scores(queries, threads) for selection in selections], axis=1)
    results = []
    for row, length in zip(scores, queries.lengths, strict=True):
        best: Sequence[Any] | IndexArray = best_first(row, k) if length else ()
        owners = np.searchsorted(starts, best, side="right") - 1
        results.append(
            [
                selections[owner].hit(position - starts[owner], float(row[position]))
                for owner, position in zip(owners, best, strict=True)
            ]
        )
    return results


@dataclass(frozen=True, kw_only=True, eq=False)
class _Selection:
    """Documents of a view that a search may find: each has rows."""

    view: View  # the view
    documents: IndexArray | None  # int64, their numbers in ascending order; `None` is all

    @classmethod
    def of(cls, view: View, search: Search, numbers: Mapping[int, Sequence[int]] | None) -> Self:
        """The documents that match; ``numbers`` are those of the search's ids, by block."""
        if numbers is None and not search.conditions and view.all_searchable:
            return cls(view=view, documents=None)
        mask = view.searchable
        if search.conditions:
            mask = mask & view.block.table(view.documents).mask(search.conditions)
        if numbers is not None:
            named = np.zeros(view.documents, dtype=np.bool_)
            named[numbers.get(view.block.serial, [])] = True
            mask = mask & named
        return cls(view=view, documents=np.flatnonzero(mask))

    def __len__(self) -> int:
        return self.view.documents if self.documents is None else len(self.documents)

    def scores(self, queries: Ragged, threads: int) -> npt.NDArray[np.float32]:
        """MaxSim ``[q, selected documents]``."""
        return self.view.scorer(queries, documents=self.documents, threads=threads)

    def codes(self) -> Codes:
        """The codes to scan."""
        allowed = None
        if self.documents is not None:
            mask = np.zeros(self.view.documents, dtype=np.bool_)
            mask[self.documents] = True
            allowed = np.packbits(mask, bitorder="little")
        assert self.view.codes is not None
        return Codes(codes=self.view.codes[: self.view.rows], offsets=self.view.offsets, allowed=allowed)

    def hit(self, position: int, score: float) -> Hit:
        """The document at a position among those selected, as a hit."""
        block = self.view.block
        number = position if self.documents is None else self.documents[position]
        return Hit(
            id=block.ids[number],
            score=score,
            exact=True,
            text=block.texts[number],
            metadata=copy.deepcopy(block.metadata[number]),
        )
