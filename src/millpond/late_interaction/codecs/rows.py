"""Codecs: how the token rows of an index are stored. One row of the table for each; a new one also needs a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from millpond.errors import InvalidRequestError
from millpond.late_interaction.kernels.compiled import address, aligned, compiled, fields, run, tensor

FloatArray = npt.NDArray[np.float32]
ScaleArray = npt.NDArray[np.float16]
Packed = tuple[npt.NDArray[Any], ScaleArray | None]

MemoryCodec = Literal["int8", "bfloat16", "float32"]
PlaidCodec = Literal["int8", "4", "2"]

_LARGEST_SCALE = float(np.finfo(np.float16).max)
# Sums of whole numbers below this are exact in float32.
_EXACT = 1 << 24
_STEP = 4_096  # rows quantized at a time without the kernel


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How token rows are stored.

    Attributes:
        name: Its name in options, statistics and manifests.
        dtype: Of a packed row's numbers, in memory and on disk.
        columns: Packed rows have a multiple of so many: the kernels read words of 4 bytes.
        kernel: The compiled kernel that scores packed rows.
        packed: Fills packed rows; ``None`` if they are the numbers themselves.
        scaled: Whether a packed row has a float16 scale.
        bits: Bits a dimension of the residuals that replace the rows once there are centroids; 0: the rows stay.
    """

    name: str
    dtype: np.dtype[Any]
    columns: int
    kernel: str
    packed: Callable[[FloatArray, npt.NDArray[Any]], ScaleArray | None] | None = None
    scaled: bool = False
    bits: int = 0

    def width(self, dim: int) -> int:
        """Columns of packed rows of ``dim`` numbers."""
        return -(-dim // self.columns) * self.columns

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of packed rows as torch computes with them."""
        return self.to_torch(np.empty((0, 0), dtype=self.dtype)).dtype

    def pack(self, rows: npt.NDArray[Any]) -> Packed:
        """Token rows as they are stored.

        ``"int8"``: each row is divided by a scale, a 127th of its largest magnitude in float16, and rounded to the
        nearest integer, so a number is off by half a scale at most. ``"bfloat16"``: rounded to the nearest.
        ``"float32"``: the rows themselves, uncopied if they are contiguous. A row with a NaN or an infinity gives NaN
        scores in int8; the others keep infinities. A row of zeros is kept.

        Args:
            rows: ``[tokens, d]``, computed in float32.

        Returns:
            Rows ``[tokens, width(d)]``, the columns from ``d`` on 0, and the scales ``[tokens]`` if there are any.

        Raises:
            InvalidRequestError: A number is too large for int8 (8.3 million).
        """
        numbers = np.require(rows, dtype=np.float32, requirements="C")
        if self.packed is None:
            return numbers, None
        packed = aligned((len(numbers), self.width(numbers.shape[1])), self.dtype.type)
        return packed, self.packed(numbers, packed)

    def unpack(self, rows: npt.NDArray[Any], scales: ScaleArray | None, dim: int) -> FloatArray:
        """The float32 numbers ``[tokens, dim]`` that packed rows stand for."""
        if scales is not None:
            return rows[:, :dim] * scales.astype(np.float32)[:, None]
        if rows.dtype == np.uint16:
            return (rows[:, :dim].astype(np.uint32) << 16).view(np.float32)
        return rows[:, :dim]

    def to_torch(self, rows: npt.NDArray[Any]) -> torch.Tensor:
        """Packed rows as torch computes with them, in the same memory."""
        packed = tensor(rows)
        return packed.view(torch.bfloat16) if self.dtype == np.uint16 else packed

    def queries(self, rows: FloatArray, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Query tokens rounded as the kernels round them: ``[query tokens, width]``, and for int8 their scales."""
        numbers, dim = tensor(rows), rows.shape[1]
        padded = torch.zeros(len(numbers), width)
        if not self.scaled:
            padded[:, :dim] = numbers.bfloat16() if self.dtype == np.uint16 else numbers
            return padded, None
        largest = numbers.abs().amax(dim=1) if dim > 0 else torch.zeros(len(numbers))
        scales = torch.where(largest.isfinite(), largest / 127, torch.nan)  # [query tokens]
        divisors = torch.where(scales > 0, scales, torch.inf)
        padded[:, :dim] = (numbers / divisors[:, None]).round().nan_to_num(0)
        return padded.to(torch.float32 if 127 * 127 * width < _EXACT else torch.float64), scales


class _PackCall(ctypes.Structure):
    """``struct PackCall`` of packing.h."""

    _fields_ = fields(pointers="from rows scales", integers="count dim width")


def _packed_by_kernel(name: str, numbers: FloatArray, packed: npt.NDArray[Any], scales: ScaleArray | None) -> bool:
    """Whether this processor has the kernel."""
    kernel = compiled(name)
    if kernel is None:
        return False
    scale_address = None if scales is None else address(scales)
    call = _PackCall(address(numbers), address(packed), scale_address, *numbers.shape, packed.shape[1])
    run(kernel, call)
    return True


def _pack_bfloat16(numbers: FloatArray, packed: npt.NDArray[Any]) -> None:
    dim = numbers.shape[1]
    if not _packed_by_kernel("pack_bfloat16", numbers, packed, None):
        packed[:, :dim] = tensor(numbers).bfloat16().view(torch.uint16).numpy()
        packed[:, dim:] = 0


def _pack_int8(numbers: FloatArray, packed: npt.NDArray[Any]) -> ScaleArray:
    scales = np.empty(len(numbers), dtype=np.float16)
    if not _packed_by_kernel("pack_int8", numbers, packed, scales):
        for start in range(0, len(numbers), _STEP):
            step = slice(start, start + _STEP)
            scales[step] = _quantize(numbers[step], packed[step])
    if np.isinf(scales).any():
        largest = np.abs(numbers[np.isinf(scales)]).max()
        raise InvalidRequestError(
            f"a token vector has the number {largest:.3g}, and codec='int8' stores numbers up to "
            f"{127 * _LARGEST_SCALE:.3g}; normalize the vectors, or use codec='bfloat16'"
        )
    return scales


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


INT8 = Codec(name="int8", dtype=np.dtype(np.int8), columns=4, kernel="maxsim_int8", packed=_pack_int8, scaled=True)
BFLOAT16 = Codec(name="bfloat16", dtype=np.dtype(np.uint16), columns=2, kernel="maxsim_bfloat16", packed=_pack_bfloat16)
FLOAT32 = Codec(name="float32", dtype=np.dtype(np.float32), columns=1, kernel="maxsim_float32")
CODECS = {
    codec.name: codec
    for codec in (INT8, BFLOAT16, FLOAT32, replace(INT8, name="4", bits=4), replace(INT8, name="2", bits=2))
}
MEMORY_CODECS: tuple[MemoryCodec, ...] = ("int8", "bfloat16", "float32")
PLAID_CODECS: tuple[PlaidCodec, ...] = ("int8", "4", "2")


def codec_of(name: str, among: tuple[str, ...]) -> Codec:
    """The codec of a name.

    Raises:
        InvalidRequestError: It is not among those that an index can store.
    """
    if name not in among:
        raise InvalidRequestError(f"codec={name!r} is unknown; choose {', '.join(map(repr, among))}")
    return CODECS[name]
