"""Residuals: exact MaxSim over documents whose tokens are centroid codes and residuals of 2 or 4 bits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from millpond.late_interaction.kernels.centroids import int8_rows
from millpond.late_interaction.kernels.compiled import address, compiled, contiguous, fields, run, thread_count

_BLOCK = 1 << 15  # document tokens scored at a time


class _ScoreCall(ctypes.Structure):
    """``struct ScoreCall`` of residuals.h."""

    _fields_ = fields(
        pointers="codes scales residuals offsets documents levels query query_scales similarities out",
        integers="count width bits dim tokens columns threads next failed",
    )


class _EncodeCall(ctypes.Structure):
    """``struct EncodeCall`` of residuals.h."""

    _fields_ = fields(
        pointers="rows centroids codes std levels scales residuals", integers="count dim bits width threads next failed"
    )


class Quantizer(Protocol):
    """The part of :class:`millpond.late_interaction.codecs.residual.ResidualCodec` that scoring needs."""

    @property
    def std(self) -> npt.NDArray[np.float32]:
        """Spread of each dimension, ``[d]``."""
        ...

    @property
    def bits(self) -> int:
        """Bits a dimension."""
        ...

    @property
    def levels(self) -> npt.NDArray[np.int8]:
        """Level of each residual number."""
        ...

    @property
    def level_scale(self) -> float:
        """The value of level 1."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """Documents as centroid codes and residuals.

    Attributes:
        codes: uint16 ``[n]`` of all tokens, each less than the number of centroids.
        scales: float16 ``[n]``.
        residuals: uint8 ``[n, width]``.
        offsets: int64 ``[documents + 1]``.
    """

    codes: npt.NDArray[np.uint16]
    scales: npt.NDArray[np.float16]
    residuals: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


def score(
    query: npt.NDArray[np.floating[Any]],
    stored: Stored,
    documents: npt.NDArray[np.int64],
    codec: Quantizer,
    similarities: npt.NDArray[np.float32],
    *,
    threads: int | None = None,
) -> npt.NDArray[np.float32]:
    """MaxSim of a query with documents as they are stored: no row is expanded to floats.

    The query is rounded to int8 twice: as it is for the centroids, and multiplied by ``std`` for the residuals. The
    rounding is the only difference from MaxSim over the decoded rows: with ``a`` the largest number of a query token
    and ``b`` that of the token times ``std``, a similarity is off by at most
    ``(a * |centroid|_1 + b * scale * level_scale * |levels|_1) / 254``, and by a tenth of that as a rule.

    Args:
        query: ``[tokens, d]``.
        stored: All documents.
        documents: int64 ``[c]``: the documents to score.
        codec: The codec that encoded them.
        similarities: Of the query, by :func:`millpond.late_interaction.kernels.centroids.similarities`.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        float32 ``[c]``; ``-inf`` for a document without tokens, and 0 if the query has none.
    """
    if len(query) == 0 or len(documents) == 0:
        return np.zeros(len(documents), dtype=np.float32)
    levels, query_scales = int8_rows(np.asarray(query, dtype=np.float32) * codec.std)
    query_scales *= np.float32(codec.level_scale)
    kernel = compiled("score_residuals")
    if kernel is None:
        return _score_by_torch(levels, query_scales, stored, documents, codec, similarities)
    out = np.zeros(len(documents), dtype=np.float32)
    columns = similarities.shape[1]
    query_scales = np.concatenate((query_scales, np.zeros(columns - len(query), dtype=np.float32)))
    unsigned = np.zeros(16, dtype=np.uint8)
    unsigned[: len(codec.levels)] = codec.levels.view(np.uint8) ^ np.uint8(128)
    codes, scales = contiguous(stored.codes, np.uint16), contiguous(stored.scales, np.float16)
    residuals, offsets = contiguous(stored.residuals, np.uint8), contiguous(stored.offsets, np.int64)
    documents, similarities = contiguous(documents, np.int64), contiguous(similarities, np.float32)
    pointers = (codes, scales, residuals, offsets, documents, unsigned, levels, query_scales, similarities, out)
    call = _ScoreCall(
        *map(address, pointers),
        count=len(documents),
        width=residuals.shape[1],
        bits=codec.bits,
        dim=levels.shape[1],
        tokens=len(query),
        columns=columns,
        threads=thread_count(threads),
    )
    run(kernel, call)
    return out


def _score_by_torch(
    levels: npt.NDArray[np.int8],
    query_scales: npt.NDArray[np.float32],
    stored: Stored,
    documents: npt.NDArray[np.int64],
    codec: Quantizer,
    similarities: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """As :func:`score`, for a query ``[tokens, d]`` of int8 levels with their scales."""
    out = np.zeros(len(documents), dtype=np.float32)
    matrix = torch.from_numpy(levels.astype(np.float32))  # [query tokens, d]
    starts, ends = np.asarray(stored.offsets)[documents], np.asarray(stored.offsets)[documents + 1]
    out[starts == ends] = -np.inf
    filled = np.flatnonzero(ends > starts)
    counts = np.cumsum((ends - starts)[filled])
    done = 0
    while done < len(filled):
        before = int(counts[done - 1]) if done else 0
        stop = max(done + 1, int(np.searchsorted(counts, before + _BLOCK, side="right")))
        some = filled[done:stop]
        bounds = np.concatenate(([0], counts[done : stop - 1] - before))
        total = int(counts[stop - 1]) - before
        rows = np.arange(total) + np.repeat(starts[some] - bounds, ends[some] - starts[some])
        numbers = unpack(stored.residuals[rows], codec.bits, levels.shape[1])
        # Sums of products of int8 are exact in float32 below 2^24, as in the compiled kernel.
        products = (torch.from_numpy(codec.levels[numbers].astype(np.float32)) @ matrix.T).numpy()
        products *= query_scales
        products *= stored.scales[rows].astype(np.float32)[:, None]
        products += similarities[stored.codes[rows], : len(levels)]
        out[some] = np.maximum.reduceat(products, bounds, axis=0).sum(axis=1)
        done = stop
    return out


def encode(
    rows: npt.NDArray[np.float32],
    codes: npt.NDArray[np.uint16],
    values: npt.NDArray[np.float32],
    codec: Quantizer,
    *,
    threads: int | None = None,
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.uint8]]:
    """The scales and the packed residuals of rows.

    A residual is divided by ``std`` and by its own root mean square, and each number rounded to the nearest level. The
    scale of the result makes its error small above all along the row itself: queries that find a row point the same
    way, so that part of the error counts ``d`` times as much as the others. (The loss is that of anisotropic vector
    quantization, arXiv 1908.10396; with one number a row to choose, its minimum is a quotient.)

    Args:
        rows: float32 ``[n, d]``.
        codes: The centroid of each.
        values: The centroids, float32 ``[K, d]``.
        codec: The codec.
        threads: Most threads; ``None`` is as many as torch uses.

    Returns:
        float16 ``[n]`` and uint8 ``[n, ceil(d * bits / 8)]``.
    """
    levels = codec.levels * np.float32(codec.level_scale)
    scales = np.empty(len(rows), dtype=np.float16)
    packed = np.zeros((len(rows), -(-rows.shape[1] * codec.bits // 8)), dtype=np.uint8)
    kernel = compiled("encode_residuals")
    if kernel is not None:
        rows, codes = contiguous(rows, np.float32), contiguous(codes, np.uint16)
        values, std = contiguous(values, np.float32), contiguous(codec.std, np.float32)
        call = _EncodeCall(
            rows=address(rows),
            centroids=address(values),
            codes=address(codes),
            std=address(std),
            levels=address(levels),
            scales=address(scales),
            residuals=address(packed),
            count=len(rows),
            dim=rows.shape[1],
            bits=codec.bits,
            width=packed.shape[1],
            threads=thread_count(threads),
        )
        run(kernel, call)
        return scales, packed
    for begin in range(0, len(rows), _BLOCK):
        some = slice(begin, begin + _BLOCK)
        residuals = rows[some] - values[codes[some]]
        spread = residuals / codec.std
        spread /= np.sqrt(np.square(spread).mean(axis=1, keepdims=True)) + np.float32(1e-9)
        numbers = np.searchsorted((levels[1:] + levels[:-1]) / 2, spread.ravel()).astype(np.uint8)
        numbers = numbers.reshape(spread.shape)
        scale = _scale(rows[some], residuals, levels[numbers] * codec.std)
        scales[some] = np.minimum(scale, np.finfo(np.float16).max)
        packed[some] = pack(numbers, codec.bits)
    return scales, packed


def _scale(
    rows: npt.NDArray[np.float32], residuals: npt.NDArray[np.float32], steps: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The scales of ``steps``, the quantized residuals; at most twice or half the one of least squared error."""
    length, size = _products(rows, rows), _products(steps, steps)
    along, wanted, match = _products(rows, steps), _products(rows, residuals), _products(residuals, steps)
    weight = rows.shape[1] / np.where(length > 0, length, np.inf)
    plain = match / size
    scale: npt.NDArray[np.float32] = (weight * along * wanted + match) / (weight * along * along + size)
    return np.clip(scale, plain / 2, plain * 2)


def _products(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    products: npt.NDArray[np.float32] = np.einsum("nd,nd->n", a, b)
    return products


def pack(numbers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Numbers below ``2 ** bits``, ``[n, d]``, in ``ceil(d * bits / 8)`` bytes a row."""
    rows, dim = numbers.shape
    parts = 8 // bits
    width = -(-dim // parts)
    padded = np.zeros((rows, parts * width), dtype=np.uint8)
    padded[:, :dim] = numbers
    packed = padded[:, :width].copy()
    for part in range(1, parts):
        packed |= padded[:, part * width : (part + 1) * width] << np.uint8(part * bits)
    return packed


def unpack(packed: npt.NDArray[np.uint8], bits: int, dim: int) -> npt.NDArray[np.uint8]:
    """The numbers ``[n, dim]`` of :func:`pack`."""
    mask = np.uint8((1 << bits) - 1)
    parts = [(packed >> np.uint8(part * bits)) & mask for part in range(8 // bits)]
    return np.concatenate(parts, axis=1)[:, :dim]
