"""Scoring: the best documents of a snapshot for a query, by a scan of codes and MaxSim of what it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.residual import ResidualCodec
from millpond.late_interaction.codecs.rows import INT8
from millpond.late_interaction.index.documents import SEARCH_TURNS, Search
from millpond.late_interaction.kernels import exact, residuals, scan
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.kernels.compiled import thread_count
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.snapshot import Snapshot
from millpond.vectors.ragged import Ragged

# Candidates that are scored exactly, at least and for each hit.
_LEAST_CANDIDATES = 1024
_CANDIDATES_PER_HIT = 20
# Queries whose scores of all documents are in memory together.
_QUERIES = 32

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A document and its score.

    Attributes:
        segment: Its segment.
        document: Its index there.
        score: MaxSim.
    """

    segment: Segment
    document: int
    score: float


def search(snapshot: Snapshot, queries: Ragged, options: Search, *, threads: int | None = None) -> list[list[Match]]:
    """The best documents for each query, best first; of equal ones the one that was added earlier."""
    segments = [
        _Searched(segment, mask, snapshot.codec)
        for segment, mask in zip(snapshot.segments, _allowed(snapshot, options), strict=True)
        if segment.entry.tokens and (mask is None or mask.any())
    ]
    keep = options.candidates or max(_LEAST_CANDIDATES, _CANDIDATES_PER_HIT * options.k)
    coded = [segment for segment in segments if segment.coded]
    # A scan pays if it leaves documents out.
    scanned = coded if not options.exact and sum(segment.count for segment in coded) > keep else []
    most = thread_count(threads)
    matches: list[list[Match]] = []
    for start in range(0, len(queries), _QUERIES):
        group = queries[start : start + _QUERIES]
        with SEARCH_TURNS.turn(most) as share:
            scored = {
                id(segment): segment.score_all(group, share)
                for segment in segments
                if segment.columns.rows is not None and segment not in scanned
            }
        for index, query in enumerate(group):
            known = {key: scores[index] for key, scores in scored.items()}
            with SEARCH_TURNS.turn(most) as share:
                matches.append(_best(segments, scanned, query, known, snapshot.codec, keep, options.k, share))
    return matches


class _Searched:
    """A segment in one search."""

    def __init__(self, segment: Segment, allowed: npt.NDArray[np.bool_] | None, codec: ResidualCodec | None) -> None:
        self.segment = segment
        self.coded = segment.entry.coded
        self.columns = segment.file.tokens(0 if codec is None else len(codec.centroids))
        self.documents = np.arange(len(self.columns)) if allowed is None else np.flatnonzero(allowed)
        self.count = len(self.documents)
        packed = None if allowed is None else np.packbits(allowed, bitorder="little")
        columns = self.columns
        self._every = allowed is None
        self._codes = (
            None if columns.codes is None else scan.Codes(codes=columns.codes, offsets=columns.offsets, allowed=packed)
        )
        self._tokens = (
            None
            if columns.rows is None
            else exact.Tokens(codec=INT8, rows=columns.rows, scales=columns.scales, offsets=columns.offsets)
        )

    @property
    def codes(self) -> scan.Codes:
        """What the scan of codes reads."""
        assert self._codes is not None
        return self._codes

    def score_all(self, queries: Sequence[FloatArray], threads: int | None) -> FloatArray:
        """MaxSim ``[q, documents]`` of int8 rows, which are read once for all queries."""
        assert self._tokens is not None
        matrices = Ragged.from_matrices(queries, width=queries[0].shape[1])
        return exact.score(matrices, self._tokens, documents=None if self._every else self.documents, threads=threads)

    def score(
        self,
        query: FloatArray,
        documents: npt.NDArray[np.int64],
        codec: ResidualCodec | None,
        similarity: FloatArray | None,
        threads: int | None,
    ) -> FloatArray:
        """MaxSim ``[documents]``; ``-inf`` for one without tokens."""
        columns = self.columns
        if self._tokens is not None:
            matrix = Ragged.from_matrices([query], width=query.shape[1])
            scores: FloatArray = exact.score(matrix, self._tokens, documents=documents, threads=threads)[0]
            return scores
        assert columns.codes is not None and columns.residuals is not None and columns.scales is not None
        assert codec is not None and similarity is not None
        stored = residuals.Stored(
            codes=columns.codes, scales=columns.scales, residuals=columns.residuals, offsets=columns.offsets
        )
        return residuals.score(query, stored, documents, codec, similarity, threads=threads)


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
    known: Mapping[int, FloatArray],
    codec: ResidualCodec | None,
    keep: int,
    k: int,
    threads: int | None,
) -> list[Match]:
    """The best matches of one query.

    Args:
        segments: The segments.
        scanned: Those of them whose codes choose ``keep`` candidates, all together.
        query: ``[tokens, d]``.
        known: For some of the others, the scores of all their documents.
        codec: The codec of segments with codes.
        keep: Candidates.
        k: Most matches.
        threads: Most threads.
    """
    if not len(query) or not segments:
        return []
    similarity = None
    if codec is not None and len(known) < len(segments):
        similarity = similarities(query, codec.centroids, threads=threads)
    candidates = {}
    if scanned and similarity is not None:
        table = scan.table(similarity, query)
        kept = scan.candidates_of(table, [segment.codes for segment in scanned], keep, threads=threads)
        candidates = dict(zip(map(id, scanned), kept, strict=True))
    documents = [candidates.get(id(segment), segment.documents) for segment in segments]
    scores = [
        known[id(segment)] if id(segment) in known else segment.score(query, some, codec, similarity, threads)
        for segment, some in zip(segments, documents, strict=True)
    ]
    score, document = np.concatenate(scores), np.concatenate(documents)
    ends = np.cumsum([len(some) for some in documents])
    best = _top(score, k)
    return [
        Match(segment=segments[owner].segment, document=int(document[index]), score=float(score[index]))
        for index, owner in zip(best, np.searchsorted(ends, best, side="right").tolist(), strict=True)
    ]


def _top(scores: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """Indices of the ``k`` largest finite scores, best first; of equal ones the lower index."""
    found = np.flatnonzero(scores > -np.inf)
    if len(found) > k:
        least = np.partition(scores[found], len(found) - k)[len(found) - k]
        found = found[scores[found] >= least]
    order = np.lexsort((found, -scores[found]))[:k]
    return found[order]
