"""Scan: approximate MaxSim of documents from the centroid codes of their tokens, by a table of 8-bit similarities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.kernels.compiled import (
    address,
    aligned,
    compiled,
    contiguous,
    fields,
    run,
    thread_count,
)

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
    """The similarity of every centroid to every query token in 8 bits, on one scale for all tokens.

    Attributes:
        cells: uint8 ``[K, columns]``; columns behind the query's tokens are 0.
        tokens: Tokens of the query.
    """

    cells: npt.NDArray[np.uint8]
    tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """Documents as centroid codes: the part of one segment of an index that a scan reads.

    Attributes:
        codes: uint16 ``[tokens]``, each less than the number of centroids: the kernels do not check that.
        offsets: int64 ``[n + 1]``; document ``i`` is ``codes[offsets[i]:offsets[i + 1]]``.
        allowed: uint8 ``[ceil(n / 8)]``, as ``numpy.packbits(mask, bitorder="little")`` packs it: the documents that
            may be found; ``None`` is all.
    """

    codes: npt.NDArray[np.uint16]
    offsets: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1


def table(similarities: npt.NDArray[np.float32], query: npt.NDArray[np.floating]) -> Table:
    """The 8-bit table of a query.

    A cell of 255 is the best centroid of that token, and 0 a similarity lower than that by the length of the query's
    longest token, or more: centroids that far off cannot be a document's best match unless nothing in it matches.

    Args:
        similarities: float32 ``[K, columns]`` of :func:`millpond.late_interaction.kernels.centroids.similarities`.
        query: ``[tokens, d]``.
    """
    tokens = len(query)
    count, columns = similarities.shape
    cells = aligned((count, columns), np.uint8)
    query = np.asarray(query, dtype=np.float32)
    span = max(float(np.sqrt(np.einsum("td,td->t", query, query).max(initial=0))), 1e-9)
    kernel = compiled("similarity_table")
    if kernel is not None:
        similarities = contiguous(similarities, np.float32)
        call = _TableCall(
            similarities=address(similarities),
            cells=address(cells),
            count=count,
            columns=columns,
            tokens=tokens,
            span=span,
        )
        run(kernel, call)
        return Table(cells=cells, tokens=tokens)
    cells[:, tokens:] = 0
    if tokens:
        used = similarities[:, :tokens]
        scaled = used - (used.max(axis=0) - np.float32(span))
        scaled *= np.float32(_LARGEST / span)
        cells[:, :tokens] = np.rint(np.clip(scaled, 0, _LARGEST))
    return Table(cells=cells, tokens=tokens)


def candidates(
    table: Table,
    codes: npt.NDArray[np.uint16],
    offsets: npt.NDArray[np.int64],
    keep: int,
    *,
    allowed: npt.NDArray[np.uint8] | None = None,
    threads: int | None = None,
) -> npt.NDArray[np.int64]:
    """The ``keep`` documents with the largest approximate MaxSim, in ascending order of their index.

    A document without tokens, and one that is not ``allowed``, is never among them. Of equal documents those with the
    lower index are taken.

    Args:
        table: The query's table.
        codes: See :class:`Codes`.
        offsets: See :class:`Codes`.
        keep: Most documents to return.
        allowed: See :class:`Codes`.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        int64 ``[at most keep]``.
    """
    return candidates_of(table, [Codes(codes=codes, offsets=offsets, allowed=allowed)], keep, threads=threads)[0]


def candidates_of(
    table: Table, segments: Sequence[Codes], keep: int, *, threads: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """:func:`candidates` of several segments together: the ``keep`` best of all, as indices into each segment.

    Of equal documents those of the earlier segment are taken.
    """
    starts = np.concatenate(([0], np.cumsum([len(segment) for segment in segments]))).astype(np.int64)
    scores = np.zeros(int(starts[-1]), dtype=np.uint32)
    for segment, start in zip(segments, starts, strict=False):
        _scan(table, segment, scores[start : start + len(segment)], threads)
    found = _best(scores, keep, table.tokens * _LARGEST + 1)
    bounds = np.searchsorted(found, starts)
    return [found[bounds[i] : bounds[i + 1]] - starts[i] for i in range(len(segments))]


def _scan(table: Table, segment: Codes, scores: npt.NDArray[np.uint32], threads: int | None) -> None:
    """Write 1 + the sum of the best cells of each document; 0 stays where a document is no candidate."""
    offsets = contiguous(segment.offsets, np.int64)
    kernel = compiled("scan_codes")
    if kernel is not None and table.tokens:
        codes = contiguous(segment.codes, np.uint16)
        allowed = None if segment.allowed is None else contiguous(segment.allowed, np.uint8)
        call = _ScanCall(
            cells=address(table.cells),
            codes=address(codes),
            offsets=address(offsets),
            allowed=None if allowed is None else address(allowed),
            scores=address(scores),
            count=len(segment),
            columns=table.cells.shape[1],
            threads=thread_count(threads),
        )
        run(kernel, call)
        return
    wanted = np.diff(offsets) > 0
    if segment.allowed is not None:
        wanted &= np.unpackbits(segment.allowed, count=len(segment), bitorder="little").view(np.bool_)
    documents = np.flatnonzero(wanted)
    ends = np.cumsum(offsets[documents + 1] - offsets[documents])  # tokens up to each wanted document's end
    done = 0
    while done < len(documents):
        before = int(ends[done - 1]) if done else 0
        stop = max(done + 1, int(np.searchsorted(ends, before + _BLOCK, side="right")))
        some = documents[done:stop]
        if len(some) == some[-1] + 1 - some[0]:
            codes = segment.codes[offsets[some[0]] : offsets[some[-1] + 1]]
        else:
            codes = np.concatenate([segment.codes[offsets[i] : offsets[i + 1]] for i in some])
        cells = table.cells[codes]  # [tokens, columns]
        bounds = np.concatenate(([0], ends[done : stop - 1] - before))
        if table.tokens == 0:
            cells = np.zeros((len(codes), 1), dtype=np.uint8)
        scores[some] = np.maximum.reduceat(cells, bounds, axis=0).sum(axis=1, dtype=np.uint32) + np.uint32(1)
        done = stop


def _best(scores: npt.NDArray[np.uint32], keep: int, largest: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the ``keep`` largest scores above 0; ``largest`` is the most that a score can be."""
    kernel = compiled("best_documents")
    if kernel is not None and len(scores) and keep > 0:
        keep = min(keep, len(scores))
        found = np.empty(keep, dtype=np.int64)
        call = _BestCall(scores=address(scores), found=address(found), count=len(scores), keep=keep, largest=largest)
        return found[: run(kernel, call)]
    counts = np.bincount(scores, minlength=largest + 1)[: largest + 1]
    counts[0] = 0
    at_least = counts[::-1].cumsum()[::-1]  # documents with a score of i or more
    if keep <= 0:
        return np.empty(0, dtype=np.int64)
    if at_least[0] <= keep:
        return np.flatnonzero(scores)
    cut = int(np.flatnonzero(at_least >= keep)[-1])
    above = scores > cut
    level = np.flatnonzero(scores == cut)[: keep - np.count_nonzero(above)]
    above[level] = True
    return np.flatnonzero(above)
