"""Exact MaxSim over documents whose tokens are centroid codes and residuals of 2 or 4 bits."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.codecs.residual import Encoded, ResidualCodec, unpack
from millpond.late_interaction.kernels.centroids import int8_rows
from millpond.late_interaction.kernels.compiled import compiled, fields, run, thread_count
from millpond.vectors.ragged import runs

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

_BLOCK = 1 << 15  # document tokens scored at a time without the kernel


class _ScoreCall(ctypes.Structure):
    """``struct ScoreCall`` of residuals.h."""

    _fields_ = fields(
        pointers="codes scales residuals offsets documents levels query query_scales similarities out",
        integers="count width bits dim tokens columns threads next failed",
    )


def score(
    query: npt.NDArray[np.floating[Any]],
    stored: Encoded,
    offsets: IndexArray,
    documents: IndexArray,
    codec: ResidualCodec,
    similarities: FloatArray,
    *,
    threads: int | None = None,
) -> FloatArray:
    """MaxSim of a query with documents as they are stored: no row is expanded to floats.

    The query is rounded to int8 twice: as it is for the centroids, and multiplied by ``std`` for the residuals. The
    rounding is the only difference from MaxSim over the decoded rows: with ``a`` the largest number of a query token
    and ``b`` that of the token times ``std``, a similarity is off by at most
    ``(a * |centroid|_1 + b * scale * level_scale * |levels|_1) / 254``, and by a tenth of that as a rule.

    Args:
        query: ``[tokens, d]``.
        stored: All rows; each code is less than the number of centroids.
        offsets: int64 ``[n + 1]`` of the documents in ``stored``.
        documents: int64 ``[c]``: the documents to score.
        codec: The codec that encoded them.
        similarities: Of the query, by :func:`millpond.late_interaction.kernels.centroids.similarities`.
        threads: Most threads; ``None`` is the number of this process.

    Returns:
        float32 ``[c]``; ``-inf`` for a document without tokens, and 0 if the query has none.
    """
    out = np.zeros(len(documents), dtype=np.float32)
    if len(query) == 0 or len(documents) == 0:
        return out
    levels, scales = int8_rows(np.asarray(query, dtype=np.float32) * codec.std)
    scales *= np.float32(codec.level_scale)
    kernel = compiled("score_residuals")
    if kernel is None:
        _score_by_numpy(levels, scales, stored, offsets, documents, codec, similarities, out)
        return out
    columns = similarities.shape[1]
    scales = np.concatenate((scales, np.zeros(columns - len(query), dtype=np.float32)))
    unsigned = np.zeros(16, dtype=np.uint8)
    unsigned[: len(codec.levels)] = codec.levels.view(np.uint8) ^ np.uint8(128)
    rows = (stored.codes, stored.scales, stored.residuals, offsets, documents, unsigned, levels, scales, similarities)
    arrays = (*map(np.ascontiguousarray, rows), out)
    dim, most = levels.shape[1], thread_count(threads)
    run(kernel, _ScoreCall, arrays, len(documents), codec.width, codec.bits, dim, len(query), columns, most)
    return out


@np.errstate(invalid="ignore", over="ignore")  # of rows that are not finite
def _score_by_numpy(
    levels: npt.NDArray[np.int8],
    query_scales: FloatArray,
    stored: Encoded,
    offsets: IndexArray,
    documents: IndexArray,
    codec: ResidualCodec,
    similarities: FloatArray,
    out: FloatArray,
) -> None:
    """As :func:`score`, for a query ``[tokens, d]`` of int8 levels with their scales."""
    matrix = levels.astype(np.float32)  # [query tokens, d]
    starts, ends = offsets[documents], offsets[documents + 1]
    out[starts == ends] = -np.inf
    filled = np.flatnonzero(ends > starts)
    bounds = np.concatenate(([0], np.cumsum((ends - starts)[filled])))
    for first, last in runs(bounds, _BLOCK, _BLOCK):
        some = filled[first:last]
        begins = bounds[first:last] - bounds[first]
        rows = np.arange(bounds[last] - bounds[first]) + np.repeat(starts[some] - begins, ends[some] - starts[some])
        numbers = unpack(stored.residuals[rows], codec.bits, codec.dim)
        # Sums of products of int8 are exact in float32 below 2^24, as in the compiled kernel.
        products = codec.levels[numbers].astype(np.float32) @ matrix.T
        products *= query_scales
        products *= stored.scales[rows].astype(np.float32)[:, None]
        products += similarities[stored.codes[rows], : len(levels)]
        out[some] = np.maximum.reduceat(products, begins, axis=0).sum(axis=1)
