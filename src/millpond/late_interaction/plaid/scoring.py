"""Scoring: the best documents of a snapshot for a query, by a scan of codes and MaxSim of what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.index import SearchOptions
from millpond.late_interaction.kernels import residuals, scan
from millpond.late_interaction.kernels.centroids import similarities
from millpond.late_interaction.plaid import int8_rows
from millpond.late_interaction.plaid.segment import Segment
from millpond.late_interaction.plaid.snapshot import Snapshot
from millpond.late_interaction.residual_codec import Codec
from millpond.ragged import Ragged

# Candidates that are scored exactly, at least and for each hit.
_LEAST_CANDIDATES = 1024
_CANDIDATES_PER_HIT = 20


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


def search(
    snapshot: Snapshot, queries: Ragged, options: SearchOptions, *, threads: int | None = None
) -> list[list[Match]]:
    """The best documents for each query, best first; of equal ones the one that was added earlier."""
    codec = snapshot.codec
    centroids = 0 if codec is None else len(codec.centroids)
    keep = options.candidates or max(_LEAST_CANDIDATES, _CANDIDATES_PER_HIT * options.k)
    allowed = _allowed(snapshot, options)
    segments = [
        _Searched(segment, mask, codec if segment.entry.coded else None, centroids)
        for segment, mask in zip(snapshot.segments, allowed, strict=True)
        if mask is None or mask.any()
    ]
    if sum(segment.count for segment in segments if segment.codec is not None) <= keep:
        options_exact = True
    else:
        options_exact = options.exact
    return [
        _best(segments, query, keep=None if options_exact else keep, k=options.k, threads=threads)
        if len(query) and segments
        else []
        for query in queries
    ]


class _Searched:
    """A segment in one search."""

    def __init__(
        self, segment: Segment, allowed: npt.NDArray[np.bool_] | None, codec: Codec | None, centroids: int
    ) -> None:
        self.segment = segment
        self.codec = codec
        self.columns = segment.file.tokens(centroids)
        self.allowed = allowed
        self.packed = None if allowed is None else np.packbits(allowed, bitorder="little")
        self.count = len(self.columns) if allowed is None else int(np.count_nonzero(allowed))

    def all(self) -> npt.NDArray[np.int64]:
        """Every allowed document."""
        return np.arange(len(self.columns)) if self.allowed is None else np.flatnonzero(self.allowed)

    def codes(self) -> scan.Codes:
        """What the scan of codes reads."""
        assert self.columns.codes is not None
        return scan.Codes(codes=self.columns.codes, offsets=self.columns.offsets, allowed=self.packed)

    def scores(
        self,
        query: npt.NDArray[np.float32],
        documents: npt.NDArray[np.int64],
        similarity: npt.NDArray[np.float32] | None,
        threads: int | None,
    ) -> npt.NDArray[np.float32]:
        """MaxSim of documents; ``-inf`` for one without tokens."""
        columns = self.columns
        if columns.rows is not None:
            return int8_rows.score(query, columns.rows, columns.scales, columns.offsets, documents)
        assert columns.codes is not None and columns.residuals is not None
        assert self.codec is not None and similarity is not None
        return residuals.score(
            query,
            columns.codes,
            columns.scales,
            columns.residuals,
            columns.offsets,
            documents,
            self.codec,
            similarity,
            threads=threads,
        )


def _allowed(snapshot: Snapshot, options: SearchOptions) -> list[npt.NDArray[np.bool_] | None]:
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
    segments: list[_Searched], query: npt.NDArray[np.float32], *, keep: int | None, k: int, threads: int | None
) -> list[Match]:
    """Score the candidates of all segments together; every document if ``keep`` is ``None``."""
    coded = [segment for segment in segments if segment.codec is not None]
    similarity = None
    documents = {}
    if coded:
        codec = coded[0].codec
        assert codec is not None
        # int8 rows need no similarities to centroids unless they are to be scanned.
        if keep is not None or codec.bits:
            similarity = similarities(query, codec.centroids, threads=threads)
        if keep is not None and similarity is not None:
            table = scan.table(similarity, query)
            kept = scan.candidates_of(table, [segment.codes() for segment in coded], keep, threads=threads)
            documents = dict(zip(map(id, coded), kept, strict=True))
    scores, places, owners = [], [], []
    for index, segment in enumerate(segments):
        some = documents.get(id(segment))
        some = segment.all() if some is None else some
        if len(some):
            scores.append(segment.scores(query, some, similarity, threads))
            places.append(some)
            owners.append(np.full(len(some), index))
    if not scores:
        return []
    score, place, owner = np.concatenate(scores), np.concatenate(places), np.concatenate(owners)
    return [
        Match(segment=segments[owner[index]].segment, document=int(place[index]), score=float(score[index]))
        for index in _top(score, k)
    ]


def _top(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Indices of the ``k`` largest finite scores, best first; of equal ones the lower index."""
    found = np.flatnonzero(scores > -np.inf)
    if len(found) > k:
        least = np.partition(scores[found], len(found) - k)[len(found) - k]
        found = found[scores[found] >= least]
    order = np.lexsort((found, -scores[found]))[:k]
    return found[order]
