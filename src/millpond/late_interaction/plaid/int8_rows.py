"""Int8 rows with a float16 scale each: how rows are kept before centroids are trained, and by payload "int8"."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_LEVEL = 127
_BLOCK = 1 << 15  # tokens scored at a time


def stored_columns(dim: int) -> int:
    """Columns of stored rows of ``dim`` numbers: a multiple of 4."""
    return -(-dim // 4) * 4


def pack(rows: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Round rows ``[n, d]``: int8 ``[n, stored_columns(d)]``, and the float16 scale ``[n]`` of each."""
    rows = np.asarray(rows, dtype=np.float32)
    largest = np.abs(rows).max(axis=1, initial=0)
    scales = np.where(largest > 0, largest / _LEVEL, 1).astype(np.float16)
    levels = np.rint(rows / scales.astype(np.float32)[:, None])
    packed = np.zeros((len(rows), stored_columns(rows.shape[1])), dtype=np.int8)
    packed[:, : rows.shape[1]] = np.clip(levels, -_LEVEL, _LEVEL)
    return packed, scales


def unpack(rows: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], dim: int) -> npt.NDArray[np.float32]:
    """The rows as float32 ``[n, dim]``."""
    return rows[:, :dim] * scales.astype(np.float32)[:, None]


def score(
    query: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """MaxSim of a query ``[tokens, d]`` with documents; ``-inf`` for a document without tokens.

    Args:
        query: ``[tokens, d]``.
        rows: int8 ``[n, d]`` of all tokens.
        scales: float16 ``[n]``.
        offsets: int64 ``[all documents + 1]``.
        documents: int64 ``[c]``, ascending: the documents to score.

    Returns:
        float32 ``[c]``.
    """
    out = np.full(len(documents), -np.inf, dtype=np.float32)
    matrix = torch.from_numpy(np.array(query.T, order="C"))
    starts, ends = offsets[documents], offsets[documents + 1]
    filled = np.flatnonzero(ends > starts)
    counts = np.cumsum((ends - starts)[filled])
    done = 0
    while done < len(filled):
        before = int(counts[done - 1]) if done else 0
        stop = max(done + 1, int(np.searchsorted(counts, before + _BLOCK, side="right")))
        some = filled[done:stop]
        bounds = np.concatenate(([0], counts[done : stop - 1] - before))
        tokens = np.arange(int(counts[stop - 1]) - before) + np.repeat(starts[some] - bounds, (ends - starts)[some])
        products = (torch.from_numpy(unpack(rows[tokens], scales[tokens], query.shape[1])) @ matrix).numpy()
        out[some] = np.maximum.reduceat(products, bounds, axis=0).sum(axis=1)
        done = stop
    return out
