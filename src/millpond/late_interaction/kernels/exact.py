"""Exact MaxSim over packed token rows: as int8 with a float16 scale for each token, as bfloat16, or as float32.

The compiled kernels read each row from memory once for all queries of a call (up to 256 query tokens at a time), and
rows may be memory-mapped files: nothing is copied or converted, and nothing behind the last row is read. Without the
kernels torch computes the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.late_interaction.kernels.compiled import aligned, run
from millpond.native.library import kernel_table
from millpond.vectors.ragged import Ragged

Codec = Literal["int8", "bfloat16", "float32"]
CODECS: tuple[Codec, ...] = get_args(Codec)
FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

_DTYPES: dict[Codec, type[np.generic]] = {"int8": np.int8, "bfloat16": np.uint16, "float32": np.float32}
# Kernels read rows in words of 4 bytes.
_COLUMNS: dict[Codec, int] = {"int8": 4, "bfloat16": 2, "float32": 1}
_LARGEST_SCALE = float(np.finfo(np.float16).max)

# The torch path. Similarities computed at a time: 2 MiB of float32 stay in a core's cache between product and maximum.
_BLOCK = 1 << 19
# Query tokens compared at a time.
_QUERY_TOKENS = 256
# Sums of whole numbers below this are exact in float32.
_EXACT = 1 << 24

_int, _pointer = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The packed token rows of ``n`` documents; the arrays may be memory-mapped and read-only.

    Attributes:
        codec: How rows are stored.
        rows: ``[tokens, width]`` in the codec's dtype (int8, uint16 with the bits of bfloat16, or float32); ``width``
            is the vectors' width rounded up to 4 bytes. :func:`pack_rows` makes them. They are read fastest if they
            begin at a multiple of 64 bytes; no room behind them is needed.
        scales: float16 ``[tokens]`` for int8, else ``None``.
        offsets: int64 ``[n + 1]``; document ``i`` has the rows from ``offsets[i]`` to before ``offsets[i + 1]``.
    """

    codec: Codec
    rows: npt.NDArray[Any]
    scales: npt.NDArray[np.float16] | None
    offsets: IndexArray

    def __post_init__(self) -> None:
        _check_codec(self.codec)
        rows, scales, offsets = self.rows, self.scales, self.offsets
        if rows.ndim != 2 or rows.dtype != _DTYPES[self.codec] or rows.shape[1] % _COLUMNS[self.codec] != 0:
            raise ValueError(
                f"{self.codec} rows are of shape {rows.shape} and dtype {rows.dtype}; they must be [tokens, width] of "
                f"{np.dtype(_DTYPES[self.codec])}, with a width that is a multiple of {_COLUMNS[self.codec]}"
            )
        if (self.codec == "int8") != (scales is not None):
            raise ValueError(f"scales must be given for int8 and for no other codec; this is {self.codec}")
        if scales is not None and (scales.shape != rows.shape[:1] or scales.dtype != np.float16):
            raise ValueError(f"scales must be float16 [{len(rows)}], not {scales.dtype} {list(scales.shape)}")
        if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) == 0:
            raise ValueError(f"offsets must be int64 [n + 1], not {offsets.dtype} {list(offsets.shape)}")
        if offsets[0] < 0 or offsets[-1] > len(rows) or np.any(offsets[1:] < offsets[:-1]):
            raise ValueError(f"offsets must not decrease, and stay within 0 and {len(rows)} (the rows)")

    def __len__(self) -> int:
        return len(self.offsets) - 1


class _PackCall(ctypes.Structure):
    """``struct PackCall`` of packing.h."""

    _fields_ = [
        ("from", _pointer),
        ("rows", _pointer),
        ("scales", _pointer),
        ("count", _int),
        ("dim", _int),
        ("width", _int),
    ]


class _MaxSimCall(ctypes.Structure):
    """``struct MaxSimCall`` of maxsim.h."""

    _fields_ = [
        ("rows", _pointer),
        ("scales", _pointer),
        ("offsets", _pointer),
        ("documents", _pointer),
        ("queries", _pointer),
        ("query_offsets", _pointer),
        ("out", _pointer),
        ("count", _int),
        ("query_count", _int),
        ("dim", _int),
        ("stride", _int),
        ("threads", _int),
    ]


def packed_width(dim: int, codec: Codec) -> int:
    """Columns of packed rows of ``dim`` numbers: as many, rounded up to 4 bytes."""
    columns = _COLUMNS[codec]
    return -(-dim // columns) * columns


def pack_rows(rows: npt.NDArray[Any], codec: Codec) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16] | None]:
    """Token rows as a codec stores them.

    ``"int8"``: each row is divided by a scale, a 127th of its largest magnitude in float16, and rounded to the nearest
    integer, so a number is off by half a scale at most. ``"bfloat16"``: rounded to the nearest. ``"float32"``: the rows
    themselves, uncopied if they are contiguous. A row with a NaN or an infinity gives NaN scores in every codec but
    float32 and bfloat16, where infinities are kept; a row of zeros is kept.

    Args:
        rows: ``[tokens, d]``, computed in float32.
        codec: ``"int8"``, ``"bfloat16"`` or ``"float32"``.

    Returns:
        Rows ``[tokens, packed_width(d, codec)]``, the columns from ``d`` on 0, and for int8 the scales ``[tokens]``.

    Raises:
        InvalidRequestError: A number is too large for int8 (8.3 million), or ``codec`` is unknown.
    """
    _check_codec(codec)
    numbers = np.require(rows, dtype=np.float32, requirements="C")
    if codec == "float32":
        return numbers, None
    count, dim = numbers.shape
    packed = aligned((count, packed_width(dim, codec)), _DTYPES[codec])
    scales = np.empty(count, dtype=np.float16) if codec == "int8" else None
    table = kernel_table()
    if table is not None:
        call = _PackCall(
            numbers.ctypes.data,
            packed.ctypes.data,
            None if scales is None else scales.ctypes.data,
            count,
            dim,
            packed.shape[1],
        )
        run(table.pack_bfloat16 if scales is None else table.pack_int8, call)
    elif scales is None:
        packed[:, :dim] = _tensor(numbers).bfloat16().view(torch.uint16).numpy()
        packed[:, dim:] = 0
    else:
        for start in range(0, count, 4096):
            scales[start : start + 4096] = _quantize(numbers[start : start + 4096], packed[start : start + 4096])
    if scales is not None and np.isinf(scales).any():
        largest = np.abs(numbers[np.isinf(scales)]).max()
        raise InvalidRequestError(
            f"a token vector has the number {largest:.3g}, and codec='int8' stores numbers up to "
            f"{127 * _LARGEST_SCALE:.3g}; normalize the vectors, or use codec='bfloat16'"
        )
    return packed, scales


def unpack_rows(
    rows: npt.NDArray[Any], scales: npt.NDArray[np.float16] | None, codec: Codec, *, dim: int
) -> FloatArray:
    """The float32 numbers ``[tokens, dim]`` that packed rows stand for."""
    if codec == "int8":
        assert scales is not None
        return rows[:, :dim] * scales.astype(np.float32)[:, None]
    if codec == "bfloat16":
        return (rows[:, :dim].astype(np.uint32) << 16).view(np.float32)
    return rows[:, :dim]


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
        InvalidRequestError: The queries have another width, an index is out of range, or ``threads`` is less than 1.
    """
    dim = queries.flat.shape[1]
    if packed_width(dim, tokens.codec) != tokens.rows.shape[1]:
        raise InvalidRequestError(
            f"queries are {dim} wide, and the rows of the documents {tokens.rows.shape[1]}; "
            "both must come from one model, cut to one width"
        )
    chosen = None if documents is None else _indices(documents, len(tokens))
    if threads is None:
        threads = torch.get_num_threads()
    if threads < 1:
        raise InvalidRequestError(f"threads={threads} must be 1 or more")
    table = kernel_table()
    rows = tokens.rows
    if table is None or dim == 0 or rows.strides[1] != rows.itemsize or rows.strides[0] <= 0:
        return _torch_score(queries, DeviceTokens.of(tokens, "cpu"), chosen)
    count = len(tokens) if chosen is None else len(chosen)
    out = np.empty((len(queries), count), dtype=np.float32)
    flat = np.require(queries.flat, dtype=np.float32, requirements="C")
    query_offsets = np.require(queries.offsets, dtype=np.int64, requirements="C")
    scales = None if tokens.scales is None else np.ascontiguousarray(tokens.scales)
    offsets = np.ascontiguousarray(tokens.offsets)
    call = _MaxSimCall(
        rows.ctypes.data,
        None if scales is None else scales.ctypes.data,
        offsets.ctypes.data,
        None if chosen is None else chosen.ctypes.data,
        flat.ctypes.data,
        query_offsets.ctypes.data,
        out.ctypes.data,
        count,
        len(queries),
        dim,
        rows.strides[0],
        threads,
    )
    run(getattr(table, f"maxsim_{tokens.codec}"), call)
    return out


# --- torch ------------------------------------------------------------------------------------------------------------


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
        rows = _tensor(tokens.rows)
        if tokens.codec == "bfloat16":
            rows = rows.view(torch.bfloat16)
        scales = None if tokens.scales is None else _tensor(tokens.scales).to(device)
        return cls(codec=tokens.codec, rows=rows.to(device), scales=scales, offsets=tokens.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def score_on_device(queries: Ragged, tokens: DeviceTokens, *, documents: npt.ArrayLike | None = None) -> FloatArray:
    """As :func:`score`, by torch on the device of ``tokens``, with float32 products (exact ones for int8).

    Raises:
        InvalidRequestError: The queries have another width, or an index is out of range.
    """
    dim = queries.flat.shape[1]
    if packed_width(dim, tokens.codec) != tokens.rows.shape[1]:
        raise InvalidRequestError(f"queries are {dim} wide, and the rows of the documents {tokens.rows.shape[1]}")
    return _torch_score(queries, tokens, None if documents is None else _indices(documents, len(tokens)))


def _torch_score(queries: Ragged, tokens: DeviceTokens, chosen: IndexArray | None) -> FloatArray:
    """Scores ``[q, n]``, a run of documents and some query tokens at a time."""
    starts, lengths = tokens.offsets[:-1], np.diff(tokens.offsets)  # [n]
    if chosen is not None:
        starts, lengths = starts[chosen], lengths[chosen]
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))  # [n + 1] of all rows in order
    device = tokens.rows.device
    query_rows, query_scales = _query_rows(queries.flat, tokens, device)
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
                if chosen is None:
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


def runs(ends: IndexArray, rows: int, documents: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` over runs of at most ``documents`` documents and ``rows`` rows, or of a single document.

    Args:
        ends: ``[n + 1]``, where each document begins and the last one ends.
        rows: Most rows of a run.
        documents: Most documents of a run.
    """
    start, count = 0, len(ends) - 1
    while start < count:
        fits = int(np.searchsorted(ends, ends[start] + rows, side="right")) - 1
        stop = max(start + 1, min(fits, start + documents))
        yield start, stop
        start = stop


def _query_rows(
    flat: npt.NDArray[Any], tokens: DeviceTokens, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query tokens rounded as the kernels do: ``[query tokens, width]``, and for int8 their scales."""
    numbers = _tensor(np.require(flat, dtype=np.float32))
    width = tokens.rows.shape[1]
    rows = torch.zeros(len(numbers), width)
    if tokens.codec != "int8":
        rows[:, : numbers.shape[1]] = numbers.bfloat16() if tokens.codec == "bfloat16" else numbers
        return rows.to(device), None
    largest = numbers.abs().amax(dim=1) if numbers.shape[1] > 0 else torch.zeros(len(numbers))
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)  # [query tokens]
    divisors = torch.where(scales > 0, scales, torch.inf)
    rows[:, : numbers.shape[1]] = (numbers / divisors[:, None]).round().nan_to_num(0)
    exact = torch.float32 if 127 * 127 * width < _EXACT else torch.float64
    return rows.to(device, exact), scales.to(device)


def _quantize(numbers: FloatArray, packed: npt.NDArray[np.int8]) -> npt.NDArray[np.float16]:
    """int8 rows into ``packed``; the same bits as packing.h."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        largest = np.abs(numbers).max(axis=1, initial=0)
        scales = (largest / np.float32(127)).astype(np.float16)
        bits = scales.view(np.uint16)
        bits += largest > scales.astype(np.float32) * np.float32(127.4)
        scales[~np.isfinite(largest)] = np.nan
        usable = scales > 0
        divisors = np.where(usable, scales, 1).astype(np.float32)[:, None]
        packed[:, : numbers.shape[1]] = np.where(usable[:, None], np.rint(numbers / divisors), 0)
    packed[:, numbers.shape[1] :] = 0
    return np.asarray(scales)


def _check_codec(codec: str) -> None:
    if codec not in CODECS:
        raise InvalidRequestError(f"codec={codec!r} is unknown; choose {', '.join(map(repr, CODECS))}")


def _indices(documents: npt.ArrayLike, count: int) -> IndexArray:
    """Document indices as int64 ``[m]``.

    Raises:
        InvalidRequestError: One is out of range, or they are no list of integers.
    """
    indices = np.asarray(documents)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise InvalidRequestError(f"documents is of shape {indices.shape} and {indices.dtype}; pass a list of indices")
    chosen = np.require(indices, dtype=np.int64, requirements="C")
    if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
        outside = chosen[(chosen < 0) | (chosen >= count)][0]
        raise InvalidRequestError(f"documents has the index {outside}, and there are {count} documents, from 0")
    return chosen


class _Alias:
    """The memory of an array, called writable: torch warns of memory that is not, though nothing here writes to it."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the same memory, read-only or not; copied if its columns are not contiguous."""
    return torch.from_numpy(np.asarray(_Alias(np.ascontiguousarray(array))))
