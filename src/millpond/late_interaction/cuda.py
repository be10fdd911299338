"""Token rows on a GPU, or another device of torch: stored there and compared by torch's operators."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.late_interaction.codecs.rows import Codec, ScaleArray
from millpond.late_interaction.scoring.exact import rows_of
from millpond.late_interaction.scoring.memory import Rows, Scorer
from millpond.vectors.ragged import Ragged, runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

# Similarities computed at a time.
_BLOCK = 1 << 19
# Query tokens compared at a time.
_QUERY_TOKENS = 256
_DTYPES = {np.dtype(np.uint16): torch.bfloat16}  # numpy has no bfloat16: a codec names its bits


def device_of(name: str) -> torch.device:
    """A device that torch can use.

    Raises:
        RuntimeError, TypeError, AssertionError: It cannot.
    """
    device = torch.device(name)
    torch.empty(0, device=device)
    return device


class DeviceMemory:
    """Memory of a device of torch."""

    coded = False

    def __init__(self, device: torch.device) -> None:
        self.device = str(device)

    def rows(self, codec: Codec, columns: int, capacity: int) -> Rows:
        """Room for rows on the device."""
        return _DeviceRows(codec, columns, capacity, self.device)


class _DeviceRows:
    """Packed rows on a device."""

    def __init__(self, codec: Codec, columns: int, capacity: int, device: str) -> None:
        self.codec = codec
        dtype = _DTYPES.get(codec.dtype) or torch.from_numpy(np.empty(0, codec.dtype)).dtype
        self.rows = torch.empty(capacity, columns, dtype=dtype, device=device)
        self.scales = torch.empty(capacity, dtype=torch.float16, device=device) if codec.scaled else None

    def write(self, first: int, rows: npt.NDArray[Any], scales: ScaleArray | None) -> None:
        """As :meth:`Rows.write`."""
        written = slice(first, first + len(rows))
        self.rows[written] = _tensor(rows).view(self.rows.dtype)
        if self.scales is not None and scales is not None:
            self.scales[written] = _tensor(scales)

    def read(self, rows: slice | IndexArray) -> tuple[npt.NDArray[Any], ScaleArray | None]:
        """As :meth:`Rows.read`."""
        chosen = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self.rows.device)
        packed: npt.NDArray[Any] = self.rows[chosen].cpu().view(torch.uint8).numpy().view(self.codec.dtype)
        return packed, None if self.scales is None else self.scales[chosen].cpu().numpy()

    def scorer(self, rows: int, offsets: IndexArray) -> Scorer:
        """As :meth:`Rows.scorer`."""
        if self.rows.device.type == "cuda" and find_spec("triton") is not None:
            return partial(_score_by_kernel, tokens=self, offsets=_tensor(offsets).to(self.rows.device))
        return partial(_score, tokens=self, offsets=offsets)


def _score_by_kernel(
    queries: Ragged,
    tokens: _DeviceRows,
    offsets: torch.Tensor,  # int64 [n + 1]
    *,
    documents: IndexArray | None = None,
    threads: int | None = None,
) -> FloatArray:
    """MaxSim by the compiled kernel, which reads each document's rows once for each query."""
    from millpond.late_interaction.cuda_kernels import maxsim

    rows, device = tokens.rows, tokens.rows.device
    starts, lengths = offsets[:-1], offsets.diff()  # [n]
    if documents is not None:
        chosen = _tensor(documents).to(device)
        starts, lengths = starts[chosen], lengths[chosen]
    flat, scales = tokens.codec.queries(np.require(queries.flat, dtype=np.float32), rows.shape[1])
    query = _tensor(flat).to(device)
    scores = torch.zeros(len(queries), len(lengths), device=device)
    if scores.numel() and len(query):
        longest = int(queries.lengths.max())
        with torch.cuda.device(device):
            maxsim[(scores.numel(),)](
                rows,
                rows if tokens.scales is None else tokens.scales,
                starts,
                lengths,
                query,
                query if scales is None else _tensor(scales).to(device),
                _tensor(queries.offsets).to(device),
                scores,
                *scores.shape,
                rows.shape[1],
                SCALED=scales is not None,
                WIDTH=max(32, 1 << (rows.shape[1] - 1).bit_length()),
                QUERY_TOKENS=min(64, max(16, 1 << max(0, longest - 1).bit_length())),
                TOKENS=64,
                num_warps=4,
                num_stages=3,
            )
    return scores.cpu().numpy()


def _score(
    queries: Ragged,
    tokens: _DeviceRows,
    offsets: IndexArray,
    *,
    documents: IndexArray | None = None,
    threads: int | None = None,
) -> FloatArray:
    """MaxSim by torch on the device of the rows, with float32 products (exact ones for int8)."""
    starts, lengths = offsets[:-1], np.diff(offsets)  # [n]
    if documents is not None:
        starts, lengths = starts[documents], lengths[documents]
    device = tokens.rows.device
    flat, scales = tokens.codec.queries(np.require(queries.flat, dtype=np.float32), tokens.rows.shape[1])
    query_rows = _tensor(flat).to(device)
    query_scales = None if scales is None else _tensor(scales).to(device)
    query_of = torch.repeat_interleave(_tensor(queries.lengths)).to(device)  # [query tokens]
    scores = torch.zeros(len(queries), len(lengths), device=device)
    most = max(1, _BLOCK // max(min(max(len(flat), 1), _QUERY_TOKENS), len(queries)))
    for start, stop in runs(np.concatenate(([0], np.cumsum(lengths))), most, most):
        document_of = torch.repeat_interleave(_tensor(lengths[start:stop])).to(device)  # [rows of the run]
        rows = _tensor(rows_of(starts[start:stop], lengths[start:stop])).to(device)
        for begin in range(0, len(query_rows), _QUERY_TOKENS):
            part = slice(begin, begin + _QUERY_TOKENS)
            best = torch.full((stop - start, len(query_rows[part])), -torch.inf, device=device)
            for some in range(0, len(rows), most):  # a document may be long
                step = slice(some, some + most)
                _raise_best(best, document_of[step], tokens, rows[step], query_rows[part])
            if query_scales is not None:
                best *= query_scales[part]
            scores[:, start:stop].index_add_(0, query_of[part], best.T)
    scored = scores.cpu().numpy()
    scored[np.ix_(queries.lengths > 0, lengths == 0)] = -np.inf
    return scored


def _raise_best(
    best: torch.Tensor, document_of: torch.Tensor, tokens: _DeviceRows, rows: torch.Tensor, queries: torch.Tensor
) -> None:
    """Raise ``best`` ``[documents, query tokens]`` by the similarities of some rows."""
    similarities = (tokens.rows[rows].to(queries.dtype) @ queries.T).float()
    if tokens.scales is not None:
        similarities *= tokens.scales[rows].float()[:, None]
    best.scatter_reduce_(0, document_of[:, None].expand_as(similarities), similarities, "amax")


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor of an array; a read-only one is copied, since torch warns of it."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
