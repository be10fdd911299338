"""Codecs: how the token rows of an index are stored. A new one is a row of the table, and its name in ``names``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.late_interaction.kernels.compiled import aligned, compiled, fields, run
from millpond.vectors.small_floats import from_bfloat16, to_bfloat16

FloatArray = npt.NDArray[np.float32]
ScaleArray = npt.NDArray[np.float16]

_LARGEST_SCALE = float(np.finfo(np.float16).max)
# Sums of whole numbers below this are exact in float32.
_EXACT = 1 << 24
_STEP = 4_096  # rows quantized at a time without the kernel


class _PackCall(ctypes.Structure):
    """``struct PackCall`` of packing.h."""

    _fields_ = fields(pointers="from rows scales", integers="count dim width")


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How token rows are stored, in memory and on disk."""

    name: str  # its name in options, statistics and manifests
    dtype: np.dtype[Any]  # of a packed row's numbers; uint16 for bfloat16, which numpy lacks
    columns: int = 1  # packed rows have a multiple of so many: the kernels read words of 4 bytes
    packer: str = ""  # the compiled kernel that packs rows, if there is one
    kernel: str = ""  # the compiled kernel that scores packed rows, if there is one
    scaled: bool = False  # whether each row has a float16 scale; the numbers are then int8
    # bits a dimension of the residuals that replace the rows once there are centroids; 0: the rows stay
    bits: int = 0

    def width(self, dim: int) -> int:
        """Columns of packed rows of ``dim`` numbers."""
        return -(-dim // self.columns) * self.columns

    def pack(self, rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ScaleArray | None]:
        """Token rows as they are stored.

        With scales each row is divided by a 127th of its largest magnitude in float16, and rounded to the nearest
        integer, so a number is off by half a scale at most; otherwise numbers are rounded to the nearest. float32 rows
        are not copied if they are contiguous. A row with a NaN or an infinity gives NaN scores in int8; the other
        codecs keep infinities. A row of zeros is kept.

        Args:
            rows: ``[tokens, d]``, computed in float32.

        Returns:
            Rows ``[tokens, width(d)]``, the columns from ``d`` on 0, and the scales ``[tokens]`` if there are any.

        Raises:
            InvalidRequestError: A number is too large for int8 (8.3 million).
        """
        numbers = np.require(rows, dtype=np.float32, requirements="C")
        if self.dtype == numbers.dtype:
            return numbers, None
        count, dim = numbers.shape
        packed = aligned((count, self.width(dim)), self.dtype.type)
        scales = np.empty(count, dtype=np.float16) if self.scaled else None
        kernel = compiled(self.packer)
        if kernel is not None:
            run(kernel, _PackCall, (numbers, packed, scales), count, dim, packed.shape[1])
        elif scales is None:
            packed[:, :dim] = self._rounded(numbers)
            packed[:, dim:] = 0
        else:
            for start in range(0, count, _STEP):
                step = slice(start, start + _STEP)
                scales[step] = _quantize(numbers[step], packed[step])
        if scales is not None and np.isinf(scales).any():
            largest = np.abs(numbers[np.isinf(scales)]).max()
            raise InvalidRequestError(
                f"a token vector has the number {largest:.3g}, and codec='int8' stores numbers up to "
                f"{127 * _LARGEST_SCALE:.3g}; normalize the vectors, or use codec='bfloat16'"
            )
        return packed, scales

    def unpack(self, rows: npt.NDArray[Any], scales: ScaleArray | None, dim: int) -> FloatArray:
        """The float32 numbers ``[tokens, dim]`` that packed rows stand for."""
        if scales is not None:
            return rows[:, :dim] * scales.astype(np.float32)[:, None]
        return self.floats(rows[:, :dim])

    def floats(self, rows: npt.NDArray[Any]) -> FloatArray:
        """The numbers of packed rows as float32, without their scales."""
        return from_bfloat16(rows) if self.dtype == np.uint16 else rows.astype(np.float32, copy=False)

    def queries(self, rows: FloatArray, width: int) -> tuple[npt.NDArray[np.floating[Any]], FloatArray | None]:
        """Query tokens rounded as the kernels round them: ``[query tokens, width]``, and for int8 their scales.

        The numbers are float32, or float64 where sums of products of int8 would not be exact.
        """
        dim = rows.shape[1]
        padded = np.zeros((len(rows), width), dtype=np.float32)
        if not self.scaled:
            padded[:, :dim] = self.floats(self._rounded(rows))
            return padded, None
        largest = np.abs(rows).max(axis=1, initial=0)
        scales = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))  # [query tokens]
        with np.errstate(invalid="ignore"):  # NaN, and infinities over infinity
            levels = np.rint(rows / np.where(scales > 0, scales, np.float32(np.inf))[:, None])
        padded[:, :dim] = np.nan_to_num(levels, nan=0, posinf=0, neginf=0)
        return (padded if 127 * 127 * width < _EXACT else padded.astype(np.float64)), scales

    def _rounded(self, rows: FloatArray) -> npt.NDArray[Any]:
        """The numbers in the type of packed rows, which has no scales."""
        return to_bfloat16(rows) if self.dtype == np.uint16 else rows.astype(self.dtype)


def _quantize(numbers: FloatArray, packed: npt.NDArray[np.int8]) -> ScaleArray:
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


INT8 = Codec(
    name="int8",
    dtype=np.dtype(np.int8),
    columns=4,
    packer="pack_int8",
    kernel="maxsim_int8",
    scaled=True,
)
BFLOAT16 = Codec(
    name="bfloat16",
    dtype=np.dtype(np.uint16),
    columns=2,
    packer="pack_bfloat16",
    kernel="maxsim_bfloat16",
)
FLOAT32 = Codec(name="float32", dtype=np.dtype(np.float32), kernel="maxsim_float32")
CODECS = {
    codec.name: codec
    for codec in (INT8, BFLOAT16, FLOAT32, replace(INT8, name="4", bits=4), replace(INT8, name="2", bits=2))
}


def codec_of(name: str, among: tuple[str, ...]) -> Codec:
    """The codec of a name.

    Raises:
        InvalidRequestError: It is not among those that an index can store.
    """
    if name not in among:
        raise InvalidRequestError(f"codec={name!r} is unknown; choose {', '.join(map(repr, among))}")
    return CODECS[name]
