"""Exact MaxSim over packed token rows.

The compiled kernels read each row from memory once for all queries of a call (up to 256 query tokens at a time), and
rows may be memory-mapped files: nothing is copied or converted, and nothing behind the last row is read. Without the
kernels torch computes the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.late_interaction.codecs.rows import Codec
from millpond.late_interaction.kernels.compiled import compiled, fields, run, tensor, thread_count
from millpond.vectors.ragged import Ragged, runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# The torch path. Similarities computed at a time: 2 MiB of float32 stay in a core's cache between product and maximum.
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
        threads: At most so many; a small call uses fewer. ``None``: torch's number of threads.

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
        return score_on_device(queries, DeviceTokens.of(tokens, "cpu"), documents=chosen)
    count = len(tokens) if chosen is None else len(chosen)
    out = np.empty((len(queries), count), dtype=np.float32)
    flat = np.ascontiguousarray(queries.flat, dtype=np.float32)
    query_offsets = np.ascontiguousarray(queries.offsets, dtype=np.int64)
    scales = None if tokens.scales is None else np.ascontiguousarray(tokens.scales)
    arrays = (rows, scales, np.ascontiguousarray(tokens.offsets), chosen, flat, query_offsets, out)
    run(kernel, _MaxSimCall, arrays, count, len(queries), dim, rows.strides[0], thread_count(threads))
    return out


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTokens:
    """As :class:`Tokens`, with rows and scales on a torch device: scored there by torch's operators."""

    codec: Codec
    rows: torch.Tensor
    scales: torch.Tensor | None
    offsets: IndexArray

    @classmethod
    def of(cls, tokens: Tokens, device: torch.device | str) -> DeviceTokens:
        """Tokens copied to a device; on a CPU they share memory."""
        rows = tokens.codec.to_torch(tokens.rows)
        scales = None if tokens.scales is None else tensor(tokens.scales).to(device)
        return cls(codec=tokens.codec, rows=rows.to(device), scales=scales, offsets=tokens.offsets)


def score_on_device(queries: Ragged, tokens: DeviceTokens, *, documents: IndexArray | None = None) -> FloatArray:
    """As :func:`score`, by torch on the device of ``tokens``, with float32 products (exact ones for int8).

    A run of documents and some query tokens are compared at a time.
    """
    starts, lengths = tokens.offsets[:-1], np.diff(tokens.offsets)  # [n]
    if documents is not None:
        starts, lengths = starts[documents], lengths[documents]
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))  # [n + 1] of all rows in order
    device = tokens.rows.device
    query_rows, query_scales = tokens.codec.queries(np.require(queries.flat, dtype=np.float32), tokens.rows.shape[1])
    query_rows = query_rows.to(device)
    query_scales = None if query_scales is None else query_scales.to(device)
    query_of = torch.repeat_interleave(torch.from_numpy(np.diff(queries.offsets))).to(device)  # [query tokens]
    scores = torch.zeros(len(queries), len(lengths), device=device)
    tall = min(max(len(query_rows), 1), _QUERY_TOKENS)
    most = max(1, _BLOCK // max(tall, len(queries)))
    for start, stop in runs(ends, most, most):
        document_of = torch.repeat_interleave(torch.from_numpy(lengths[start:stop])).to(device)  # [rows of the run]
        for begin in range(0, len(query_rows), _QUERY_TOKENS):
            part = slice(begin, begin + _QUERY_TOKENS)
            best = torch.full((stop - start, len(query_rows[part])), -torch.inf, device=device)
            for first in range(int(ends[start]), int(ends[stop]), most):
                last = min(first + most, int(ends[stop]))
                if documents is None:
                    rows: slice | torch.Tensor = slice(int(starts[0]) + first, int(starts[0]) + last)
                else:
                    document = np.searchsorted(ends, np.arange(first, last), side="right") - 1
                    rows = torch.from_numpy(np.arange(first, last) - ends[document] + starts[document]).to(device)
                similarities = (tokens.rows[rows].to(query_rows.dtype) @ query_rows[part].T).float()
                if tokens.scales is not None:
                    similarities *= tokens.scales[rows].float()[:, None]
                of_rows = document_of[first - int(ends[start]) : last - int(ends[start]), None]
                best.scatter_reduce_(0, of_rows.expand_as(similarities), similarities, "amax")
            if query_scales is not None:
                best *= query_scales[part]
            scores[:, start:stop].index_add_(0, query_of[part], best.T)
    scored = scores.cpu().numpy()
    scored[np.ix_(np.diff(queries.offsets) > 0, lengths == 0)] = -np.inf
    return scored
