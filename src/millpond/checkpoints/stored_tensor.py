"""StoredTensor: a tensor in a mapped file, whose numbers are read where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import ModelLoadError

_BLOCK = 1 << 16  # numbers that are converted at a time: a block and what becomes of it stay in the processor's cache
_NAN = 0x7FC0  # of bfloat16


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """A tensor in a mapped file. Its numbers are read where they are asked for.

    Arrays are views of the file, which cannot be written to, where it stores what is asked for, and else new ones.
    """

    name: str
    dtype: str  # torch's name of the stored type: "float32", "float16", "bfloat16", "int64" ...
    stored: npt.NDArray[Any]  # the mapped numbers, of bfloat16 and of eight-bit floats their bits
    rows: npt.NDArray[np.intp] | None = None  # the rows of `stored` that the tensor has; `None`: all

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.stored.shape if self.rows is None else (len(self.rows), *self.stored.shape[1:])

    def __getitem__(self, rows: slice | Sequence[int] | npt.NDArray[np.integer[Any]]) -> StoredTensor:
        """Rows of the first axis, not read yet; raises IndexError for one that the tensor does not have."""
        if isinstance(rows, slice) and self.rows is None:
            return replace(self, stored=self.stored[rows])
        held = np.arange(len(self.stored)) if self.rows is None else self.rows
        return replace(self, rows=held[rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.intp)])

    def float32(self) -> npt.NDArray[np.float32]:
        """The numbers; raises ModelLoadError for eight-bit floats, which mean nothing without their scales."""
        if self.dtype == "float32":
            return self.numbers()
        return self._converted(np.dtype(np.float32), self._to_float32)

    def bfloat16(self) -> npt.NDArray[np.uint16]:
        """The bits of the numbers in bfloat16, rounded to nearest, ties to even; raises what :meth:`float32` does."""
        if self.dtype == "bfloat16":
            return self.numbers()
        return self._converted(np.dtype(np.uint16), self._to_bfloat16)

    def numbers(self) -> npt.NDArray[Any]:
        """The numbers as they are stored, of bfloat16 and of eight-bit floats their bits."""
        stored = self.stored if self.rows is None else self.stored[self.rows]
        return stored if stored.flags.aligned and stored.flags.c_contiguous else stored.copy()

    def _converted(self, dtype: np.dtype[Any], convert: Callable[[Any, Any], None]) -> npt.NDArray[Any]:
        """The numbers as ``dtype``, read and converted block by block."""
        if self.dtype.startswith("float8"):
            raise ModelLoadError(f"{self.name} is stored as {self.dtype}, which millpond does not read; convert it")
        shape = self.shape
        converted = np.empty(shape or (1,), dtype)
        step = max(1, _BLOCK // max(1, prod(shape[1:])))
        for start in range(0, len(converted), step):
            block = slice(start, start + step)
            rows = block if self.rows is None else self.rows[block]
            convert(self.stored[rows] if shape else self.stored.reshape(1), converted[block])
        return converted.reshape(shape)

    def _to_float32(self, numbers: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
        if self.dtype == "bfloat16":
            np.left_shift(numbers, 16, out=out.view(np.uint32), dtype=np.uint32)
            return
        with np.errstate(over="ignore", invalid="ignore"):  # too large a float64 becomes infinite, as in torch
            np.copyto(out, numbers, casting="same_kind")

    def _to_bfloat16(self, numbers: npt.NDArray[Any], out: npt.NDArray[np.uint16]) -> None:
        floats = np.empty(out.shape, np.float32)
        self._to_float32(numbers, floats)
        bits = floats.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        np.copyto(out, rounded, casting="unsafe")
        out[np.isnan(floats)] = _NAN
