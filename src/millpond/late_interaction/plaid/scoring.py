"""Scoring: the best documents of a snapshot for a query, by a scan of codes and MaxSim of what it keeps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.residual import Encoded
from millpond.late_interaction.index.documents import SEARCH_TURNS, Hit, Search
from millpond.late_interaction.kernels import scan
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.kernels.compiled import thread_count
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.snapshot import Snapshot
from millpond.late_interaction.scoring import exact, residuals
from millpond.vectors.ragged import Ragged

# Candidates that are scored exactly, at least and for each hit.
_LEAST_CANDIDATES = 1024
_CANDIDATES_PER_HIT = 20
# Queries whose scores of all documents are in memory together.
_QUERIES = 32

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]


def search(snapshot: Snapshot, queries: Ragged, options: Search) -> list[list[Hit]]:
    """The best documents for each query, best first; of equal ones the one that was added earlier."""
    segments = [
        _Searched(snapshot, segment, mask)
        for segment, mask in zip(snapshot.segments, _allowed(snapshot, options), strict=True)
        if segment.entry.tokens and (mask is None or mask.any())
    ]
    keep = options.candidates or max(_LEAST_CANDIDATES, _CANDIDATES_PER_HIT * options.k)
    coded = [segment for segment in segments if segment.segment.entry.coded]
    # A scan pays if it leaves documents out.
    scanned = coded if not options.exact and sum(len(segment.documents) for segment in coded) > keep else []
    most = thread_count(None)
    results: list[list[Hit]] = []
    for start in range(0, len(queries), _QUERIES):
        group = queries[start : start + _QUERIES]
        matrices = Ragged.from_matrices(group, width=queries.flat.shape[1])
        with SEARCH_TURNS.turn(most) as share:  # rows are read once for all of them
            whole = [segment for segment in segments if segment.tokens is not None and segment not in scanned]
            scored = {segment: segment.score_rows(matrices, segment.chosen, share) for segment in whole}
        for index, query in enumerate(group):
            known = {segment: scores[index] for segment, scores in scored.items()}
            with SEARCH_TURNS.turn(most) as share:
                results.append(_best(segments, scanned, query, known, keep, options.k, share))
    return results


class _Searched:
    """A segment in one search, and those of its documents that may be found; ``chosen`` is ``None`` for all."""

    def __init__(self, snapshot: Snapshot, segment: Segment, allowed: npt.NDArray[np.bool_] | None) -> None:
        self.segment = segment
        self.trained = snapshot.trained
        self.columns = segment.file.tokens(0 if self.trained is None else len(self.trained.centroids))
        self._packed = None if allowed is None else np.packbits(allowed, bitorder="little")
        self.chosen = None if allowed is None else np.flatnonzero(allowed)
        self.documents = np.arange(len(self.columns)) if self.chosen is None else self.chosen
        rows, scales, offsets = self.columns.rows, self.columns.scales, self.columns.offsets
        codec = snapshot.manifest.row_codec
        self.tokens = rows if rows is None else exact.Tokens(codec=codec, rows=rows, scales=scales, offsets=offsets)

    def codes(self) -> scan.Codes:
        """What the scan of codes reads."""
        assert self.columns.codes is not None
        return scan.Codes(codes=self.columns.codes, offsets=self.columns.offsets, allowed=self._packed)

    def score_rows(self, queries: Ragged, documents: IndexArray | None, threads: int) -> FloatArray:
        """MaxSim ``[q, documents]`` of whole rows."""
        assert self.tokens is not None
        return exact.score(queries, self.tokens, documents=documents, threads=threads)

    def score(
        self, query: FloatArray, documents: IndexArray, similarity: FloatArray | None, threads: int
    ) -> FloatArray:
        """MaxSim ``[documents]``; ``-inf`` for one without tokens."""
        if self.tokens is not None:
            scores: FloatArray = self.score_rows(
                Ragged.from_matrices([query], width=query.shape[1]), documents, threads
            )[0]
            return scores
        columns, trained = self.columns, self.trained
        assert columns.codes is not None and columns.residuals is not None and columns.scales is not None
        assert trained is not None and similarity is not None
        stored = Encoded(codes=columns.codes, scales=columns.scales, residuals=columns.residuals)
        return residuals.score(query, stored, columns.offsets, documents, trained, similarity, threads=threads)

    def hit(self, document: int, score: float) -> Hit:
        """A document as a hit."""
        file = self.segment.file
        text, metadata = file.text(document), file.object(document)
        return Hit(id=file.id(document), score=score, exact=self.tokens is not None, text=text, metadata=metadata)


def _allowed(snapshot: Snapshot, options: Search) -> list[npt.NDArray[np.bool_] | None]:
    """For each segment, the documents that may be found; ``None`` for all."""
    found = None if options.ids is None else snapshot.find(options.ids)
    masks = []
    for index, segment in enumerate(snapshot.segments):
        mask = segment.live
        if found is not None:  # live ones only
            mask = np.zeros(segment.entry.documents, dtype=np.bool_)
            mask[found[index][found[index] >= 0]] = True
        if options.conditions:
            matching = segment.file.metadata.mask(options.conditions)
            mask = matching if mask is None else mask & matching
        masks.append(mask)
    return masks


def _best(
    segments: list[_Searched],
    scanned: list[_Searched],
    query: FloatArray,
    known: Mapping[_Searched, FloatArray],
    keep: int,
    k: int,
    threads: int,
) -> list[Hit]:
    """The best hits of one query.

    Args:
        segments: The segments.
        scanned: Those of them whose codes choose ``keep`` candidates, all together.
        query: ``[tokens, d]``.
        known: For some of the others, the scores of all their documents.
        keep: Candidates.
        k: Most hits.
        threads: Most threads.
    """
    if not len(query) or not segments:
        return []
    similarity, candidates = None, {}
    trained = segments[0].trained
    if trained is not None and len(known) < len(segments):
        similarity = similarities(query, trained.centroids, threads=threads)
    if scanned and similarity is not None:
        table = scan.table(similarity, query)
        kept = scan.candidates_of(table, [segment.codes() for segment in scanned], keep, threads=threads)
        candidates = dict(zip(scanned, kept, strict=True))
    documents = [candidates.get(segment, segment.documents) for segment in segments]
    scores = [
        known[segment] if segment in known else segment.score(query, some, similarity, threads)
        for segment, some in zip(segments, documents, strict=True)
    ]
    score, document = np.concatenate(scores), np.concatenate(documents)
    found = np.flatnonzero(score > -np.inf)
    best = found[scan.best_first(score[found], k)]
    owners = np.searchsorted(np.cumsum([len(some) for some in documents]), best, side="right")
    return [
        segments[owner].hit(int(document[index]), float(score[index]))
        for index, owner in zip(best, owners.tolist(), strict=True)
    ]
