"""Quantization of outputs: float32 rows packed to fewer bits, as sentence-transformers packs them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.tasks import OutputDtype


def quantize(rows: npt.NDArray[np.float32], dtype: OutputDtype, *, codes: bool = False) -> npt.NDArray[Any]:
    """``rows [n, d]`` as ``dtype``.

    ``int8`` and ``uint8`` divide the range of each dimension into 256 steps, so codes are comparable only with codes of
    the same call; ``binary`` (int8) and ``ubinary`` (uint8) keep the sign bits, ``[n, ceil(d / 8)]``. ``codes``: the
    rows are whole numbers from -127 to 127, which ``int8`` keeps, and whose zeros have a sign too.

    Raises:
        InvalidRequestError: ``int8``/``uint8`` of a single row, whose range is a point.
    """
    if dtype == "float32":
        return rows
    if dtype == "float16":
        return rows.astype(np.float16)
    if dtype in ("binary", "ubinary"):
        kept: npt.NDArray[np.bool_] = np.logical_not(np.signbit(rows)) if codes else np.greater(rows, 0)
        bits = np.packbits(kept, axis=-1)
        return bits if dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if codes:
        whole: npt.NDArray[Any] = np.rint(rows).astype(np.int16)
        return whole.astype(np.int8) if dtype == "int8" else np.add(whole, 128).astype(np.uint8)
    if len(rows) == 0:
        return np.empty(rows.shape, dtype=dtype)
    check_range(dtype, len(rows))
    start = rows.min(axis=0)
    step = (rows.max(axis=0) - start) / np.float32(255)
    step[step == 0] = 1
    steps = np.clip(np.floor((rows - start) / step), 0, 255)
    shifted: npt.NDArray[Any] = steps.astype(np.uint8) if dtype == "uint8" else (steps - 128).astype(np.int8)
    return shifted


def check_range(dtype: OutputDtype, count: int) -> None:
    """Refuse ``int8`` and ``uint8`` for a call of one text: the range of a single row is a point.

    Raises:
        InvalidRequestError: ``count`` is 1.
    """
    if dtype in ("int8", "uint8") and count == 1:
        raise InvalidRequestError(
            f"output_dtype={dtype!r} finds each dimension's range among the texts of the call, and this call has 1; "
            "pass at least 2 texts, or choose float16 or binary"
        )


def eight_bits(rows: npt.NDArray[np.float32], dtype: Literal["int8", "uint8"]) -> npt.NDArray[Any]:
    """``rows [n, d]`` in 255 steps, each row by itself: its largest magnitude becomes 127 (``uint8``: 128 more).

    The codes of a row do not depend on other rows, so codes of different calls are comparable by cosine, which ignores
    the scale of a row.
    """
    largest = np.abs(rows).max(axis=-1, keepdims=True, initial=0)
    largest[largest == 0] = 1
    codes = np.rint(rows / largest * np.float32(127)).astype(np.int16)
    shifted: npt.NDArray[Any] = codes.astype(np.int8) if dtype == "int8" else (codes + 128).astype(np.uint8)
    return shifted
