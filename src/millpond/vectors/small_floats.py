"""Small floats: bfloat16 and the two formats of 8 bits, which numpy lacks, as the integers of their bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class _Format(NamedTuple):
    mantissa: int  # its bits
    bias: int  # of the exponent
    largest: int  # what larger numbers become
    nan: int


_FORMATS = {
    "e4m3": _Format(mantissa=3, bias=7, largest=0x7E, nan=0x7F),  # has no infinities
    "e5m2": _Format(mantissa=2, bias=15, largest=0x7C, nan=0x7F),
}


def to_bfloat16(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each number, of two the even one; NaN stays NaN."""
    numbers = np.ascontiguousarray(rows, dtype=np.float32)
    bits = numbers.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    unordered = np.isnan(numbers)
    if unordered.any():
        rounded[unordered] = 0x7FC0
    return rounded


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """The float32 numbers of these bits."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def to_8_bits(rows: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    """The bits of the nearest number of a format of 8 bits, of two the even one.

    Args:
        rows: Numbers of any shape.
        name: ``"e4m3"`` (float8_e4m3fn; larger numbers than 448 become that) or ``"e5m2"`` (float8_e5m2; larger ones
            than 57,344 become infinite).
    """
    mantissa, bias, largest, nan = _FORMATS[name]
    numbers = np.ascontiguousarray(rows, dtype=np.float32)
    size = np.abs(numbers)
    bits = size.view(np.uint32)
    shift = 23 - mantissa
    normal = ((bits + (((bits >> shift) & 1) + np.uint32((1 << (shift - 1)) - 1))) >> shift).astype(np.int32)
    normal -= (127 - bias) << mantissa
    # Below the smallest normal number steps are equal: those of a float32 of this size.
    offset = np.float32(2.0 ** (shift + 1 - bias))
    with np.errstate(invalid="ignore"):  # NaN
        shifted = size + offset
    subnormal = shifted.view(np.int32) - offset.view(np.int32)
    rounded = np.where(size < 2.0 ** (1 - bias), subnormal, np.minimum(normal, largest))
    rounded[np.isnan(numbers)] = nan
    rounded |= np.signbit(numbers).astype(np.int32) << 7
    return rounded.astype(np.uint8)
