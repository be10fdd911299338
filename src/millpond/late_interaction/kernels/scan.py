"""Scan: approximate MaxSim of documents from the centroid codes of their tokens, by a table of 8-bit similarities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.kernels.compiled import aligned, compiled, fields, run, thread_count
from millpond.vectors.ragged import runs

_BLOCK = 1 << 17  # document tokens looked up at a time
_LARGEST = 255


class _TableCall(ctypes.Structure):
    """``struct TableCall`` of centroids.h."""

    _fields_ = fields(pointers="similarities cells", integers="count columns tokens", floats="span")


class _ScanCall(ctypes.Structure):
    """``struct ScanCall`` of scan.h."""

    _fields_ = fields(pointers="cells codes offsets allowed scores", integers="count columns threads next")


class _BestCall(ctypes.Structure):
    """``struct BestCall`` of scan.h."""

    _fields_ = fields(pointers="scores found", integers="count keep largest")


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The similarity of every centroid to every query token in 8 bits, on one scale for all tokens."""

    cells: npt.NDArray[np.uint8]  # uint8 `[K, columns]`; columns behind the query's tokens are 0
    tokens: int  # tokens of the query


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """Documents as centroid codes: the part of one segment of an index that a scan reads."""

    # uint16 `[tokens]`, each less than the number of centroids: the kernels do not check that
    codes: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]  # int64 `[n + 1]`; document `i` is `codes[offsets[i]:offsets[i + 1]]`
    # uint8 `[ceil(n / 8)]`, as `numpy.packbits(mask, bitorder="little")` packs it: the documents that may be found;
    # `None` is all
    allowed: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1


def table(similarities: npt.NDArray[np.float32], query: npt.NDArray[np.floating]) -> Table:
    """The 8-bit table of a query ``[tokens, d]`` with these similarities to the centroids, ``[K, columns]``.

    A cell of 255 is the best centroid of that token, and 0 a similarity lower than that by the length of the query's
    longest token, or more: centroids that far off cannot be a document's best match unless nothing in it matches.
    """
    tokens = len(query)
    count, columns = similarities.shape
    cells = aligned((count, columns), np.uint8)
    query = np.asarray(query, dtype=np.float32)
    span = max(float(np.sqrt(np.einsum("td,td->t", query, query).max(initial=0))), 1e-9)
    kernel = compiled("similarity_table")
    if kernel is not None:
        run(kernel, _TableCall, (np.ascontiguousarray(similarities), cells), count, columns, tokens, span)
        return Table(cells=cells, tokens=tokens)
    cells[:, tokens:] = 0
    if tokens:
        used = similarities[:, :tokens]
        scaled = used - (used.max(axis=0) - np.float32(span))
        scaled *= np.float32(_LARGEST / span)
        cells[:, :tokens] = np.rint(np.clip(scaled, 0, _LARGEST))
    return Table(cells=cells, tokens=tokens)


def candidates_of(
    table: Table, segments: Sequence[Codes], keep: int, *, threads: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """The ``keep`` documents of all segments with the largest approximate MaxSim, as ascending indices into each.

    A document without tokens, and one that is not ``allowed``, is never among them. Of equal documents those of the
    earlier segment, and in it those with the lower index, are taken.
    """
    starts = np.concatenate(([0], np.cumsum([len(segment) for segment in segments]))).astype(np.int64)
    scores = np.zeros(int(starts[-1]), dtype=np.uint32)
    for segment, start in zip(segments, starts, strict=False):
        _scan(table, segment, scores[start : start + len(segment)], thread_count(threads))
    found = _best(scores, keep, table.tokens * _LARGEST + 1)
    bounds = np.searchsorted(found, starts)
    return [found[bounds[i] : bounds[i + 1]] - starts[i] for i in range(len(segments))]


def _scan(table: Table, segment: Codes, scores: npt.NDArray[np.uint32], threads: int) -> None:
    """Write 1 + the sum of the best cells of each document; 0 stays where a document is no candidate."""
    codes, offsets, allowed = (
        np.ascontiguousarray(segment.codes),
        np.ascontiguousarray(segment.offsets),
        segment.allowed,
    )
    kernel = compiled("scan_codes")
    if kernel is not None and table.tokens:
        arrays = (table.cells, codes, offsets, allowed, scores)
        run(kernel, _ScanCall, arrays, len(segment), table.cells.shape[1], threads)
        return
    wanted = np.diff(offsets) > 0
    if allowed is not None:
        wanted &= np.unpackbits(allowed, count=len(segment), bitorder="little").view(np.bool_)
    documents = np.flatnonzero(wanted)
    ends = np.concatenate(([0], np.cumsum(np.diff(offsets)[documents])))  # tokens before each wanted document
    for first, last in runs(ends, _BLOCK, _BLOCK):
        some = documents[first:last]
        parts = [codes[start:stop] for start, stop in zip(offsets[some], offsets[some + 1], strict=True)]
        cells = table.cells[np.concatenate(parts)]  # [tokens, columns]
        if table.tokens == 0:
            cells = np.zeros((len(cells), 1), dtype=np.uint8)
        best = np.maximum.reduceat(cells, ends[first:last] - ends[first], axis=0)
        scores[some] = best.sum(axis=1, dtype=np.uint32) + np.uint32(1)


def _best(scores: npt.NDArray[np.uint32], keep: int, largest: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the ``keep`` largest scores above 0; ``largest`` is the most that a score can be."""
    kernel = compiled("best_documents")
    keep = min(keep, len(scores))
    if kernel is not None and keep > 0:
        found = np.empty(keep, dtype=np.int64)
        return found[: run(kernel, _BestCall, (scores, found), len(scores), keep, largest)]
    candidates = np.flatnonzero(scores)
    return candidates[np.sort(best_first(scores[candidates].astype(np.int64), keep))]


def best_first(scores: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """The indices of the ``k`` largest scores, the largest first; of equal ones the first."""
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        above = np.flatnonzero(scores > least)
        chosen = np.concatenate((above, np.flatnonzero(scores == least)[: k - len(above)]))
    else:
        chosen = np.arange(len(scores))
    # Equal scores are in ascending order, and a stable sort leaves them there.
    best: npt.NDArray[np.int64] = chosen[np.argsort(-scores[chosen], kind="stable")]
    return best
