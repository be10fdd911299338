"""Exact MaxSim over packed token rows.

The compiled kernels read each row from memory once for all queries of a call (up to 256 query tokens at a time), and
rows may be memory-mapped files: nothing is copied or converted, and nothing behind the last row is read. Without the
kernels numpy computes the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.kernels.compiled import compiled, fields, run, thread_count
from millpond.vectors.ragged import Ragged, runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Without the kernels. Similarities computed at a time: 2 MiB of float32 stay in a core's cache until the maximum.
_BLOCK = 1 << 19
# Query tokens compared at a time.
_QUERY_TOKENS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The packed token rows of ``n`` documents; the arrays may be memory-mapped and read-only."""

    codec: Codec  # how rows are stored
    # `[tokens, width]`, as the codec packs them. They are read fastest if they begin at a multiple of 64 bytes; no
    # room behind them is needed.
    rows: npt.NDArray[Any]
    scales: npt.NDArray[np.float16] | None  # float16 `[tokens]` if the codec has scales, else `None`
    offsets: IndexArray  # int64 `[n + 1]`; document `i` has the rows from `offsets[i]` to before `offsets[i + 1]`

    def __post_init__(self) -> None:
        codec, rows, scales, offsets = self.codec, self.rows, self.scales, self.offsets
        if rows.ndim != 2 or rows.dtype != codec.dtype or codec.width(rows.shape[1]) != rows.shape[1]:
            raise ValueError(f"rows are {rows.dtype} {rows.shape}, which codec {codec.name!r} does not pack")
        if codec.scaled != (scales is not None):
            raise ValueError(f"scales must be {'given' if codec.scaled else 'None'} for codec {codec.name!r}")
        if scales is not None and (scales.shape != rows.shape[:1] or scales.dtype != np.float16):
            raise ValueError(f"scales must be float16 [{len(rows)}], not {scales.dtype} {list(scales.shape)}")
        if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) == 0:
            raise ValueError(f"offsets must be int64 [n + 1], not {offsets.dtype} {list(offsets.shape)}")
        if offsets[0] < 0 or offsets[-1] > len(rows) or np.any(offsets[1:] < offsets[:-1]):
            raise ValueError(f"offsets must not decrease, and stay within 0 and {len(rows)} (the rows)")

    def __len__(self) -> int:
        return len(self.offsets) - 1


class _MaxSimCall(ctypes.Structure):
    """``struct MaxSimCall`` of maxsim.h."""

    _fields_ = fields(
        pointers="rows scales offsets documents queries query_offsets out",
        integers="count query_count dim stride threads",
    )


def score(
    queries: Ragged, tokens: Tokens, *, documents: npt.ArrayLike | None = None, threads: int | None = None
) -> FloatArray:
    """MaxSim of every query and every document, exactly as the documents are stored.

    Query tokens are rounded as the documents are: for int8 to a 127th of their largest magnitude (with a float32 scale;
    sums of products are whole numbers and exact), for bfloat16 to bfloat16. Between vectors of length 1 and width 128
    that changes a similarity by 0.0006 (int8) or 0.00015 (bfloat16), root mean square.

    Args:
        queries: ``q`` matrices ``[tokens, d]``, of any number of tokens.
        tokens: The documents.
        documents: Indices of the documents to score, in any order and repeated as often as wanted; ``None``: all.
        threads: At most so many; a small call uses fewer. ``None``: the number of this process.

    Returns:
        float32 ``[q, n]``, or ``[q, len(documents)]``. A document without tokens scores ``-inf``, a query without
        tokens 0, and a NaN stays visible.

    Raises:
        InvalidRequestError: The queries have another width, or an index is out of range.
    """
    dim = queries.flat.shape[1]
    if tokens.codec.width(dim) != tokens.rows.shape[1]:
        raise InvalidRequestError(
            f"queries are {dim} wide, and the rows of the documents {tokens.rows.shape[1]}; "
            "both must come from one model, cut to one width"
        )
    chosen = None if documents is None else np.require(documents, dtype=np.int64, requirements="C")
    if chosen is not None and chosen.size and (chosen.min() < 0 or chosen.max() >= len(tokens)):
        raise InvalidRequestError(f"documents has indices outside of 0 to {len(tokens) - 1}, those of the documents")
    kernel = compiled(tokens.codec.kernel)
    rows = tokens.rows
    if kernel is None or dim == 0 or rows.strides[1] != rows.itemsize or rows.strides[0] <= 0:
        return _score_by_numpy(queries, tokens, chosen)
    count = len(tokens) if chosen is None else len(chosen)
    out = np.empty((len(queries), count), dtype=np.float32)
    flat = np.ascontiguousarray(queries.flat, dtype=np.float32)
    query_offsets = np.ascontiguousarray(queries.offsets, dtype=np.int64)
    scales = None if tokens.scales is None else np.ascontiguousarray(tokens.scales)
    arrays = (rows, scales, np.ascontiguousarray(tokens.offsets), chosen, flat, query_offsets, out)
    run(kernel, _MaxSimCall, arrays, count, len(queries), dim, rows.strides[0], thread_count(threads))
    return out


def rows_of(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """The rows of documents, one after the other: int64 ``[lengths.sum()]``."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


@np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
def _score_by_numpy(queries: Ragged, tokens: Tokens, documents: IndexArray | None) -> FloatArray:
    """As :func:`score`, with float32 products (exact ones for int8).

    A run of documents and some query tokens are compared at a time.
    """
    starts, lengths = tokens.offsets[:-1], np.diff(tokens.offsets)  # [n]
    if documents is not None:
        starts, lengths = starts[documents], lengths[documents]
    flat, scales = tokens.codec.queries(np.require(queries.flat, dtype=np.float32), tokens.rows.shape[1])
    scores = np.zeros((len(queries), len(lengths)), dtype=np.float32)
    filled = np.flatnonzero(lengths)
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths[filled])))
    query_of = np.repeat(np.arange(len(queries)), queries.lengths)  # [query tokens]
    most = max(1, _BLOCK // min(max(len(flat), 1), _QUERY_TOKENS))
    for start, stop in runs(ends, most, most):
        some = filled[start:stop]
        rows: slice | IndexArray = slice(starts[some[0]], starts[some[-1]] + lengths[some[-1]])
        if documents is not None:
            rows = rows_of(starts[some], lengths[some])
        floats = tokens.codec.floats(tokens.rows[rows]).astype(flat.dtype, copy=False)
        tall = max(1, min(_QUERY_TOKENS, _BLOCK // len(floats)))  # query tokens at a time: a document may be long
        for begin in range(0, len(flat), tall):
            part = slice(begin, begin + tall)
            similarities = (flat[part] @ floats.T).astype(np.float32, copy=False)  # [query tokens, rows]
            if tokens.scales is not None:
                similarities *= tokens.scales[rows].astype(np.float32)
            best = np.maximum.reduceat(similarities, ends[start:stop] - ends[start], axis=1)
            if scales is not None:
                best *= scales[part, None]
            firsts = np.flatnonzero(np.diff(query_of[part], prepend=-1))
            scores[np.ix_(query_of[part][firsts], some)] += np.add.reduceat(best, firsts, axis=0)
    scores[np.ix_(queries.lengths > 0, lengths == 0)] = -np.inf
    return scores
