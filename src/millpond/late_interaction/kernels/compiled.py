"""The compiled kernels of late interaction, and what their calls have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.native.library import kernel_table
from millpond.support.processor import default_threads

_CACHE_LINE = 64


def fields(*, pointers: str, integers: str, floats: str = "") -> list[tuple[str, Any]]:
    """The fields of a kernel's arguments: pointers, int64 and float64, in this order, as the struct in C++ has them."""
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_double))
    return [(name, kind) for names, kind in kinds for name in names.split()]


def compiled(name: str) -> Callable[[Any], int] | None:
    """The kernel of a name, if this processor has it."""
    table = kernel_table()
    return (getattr(table, name, None) or None) if table is not None else None


def run(
    kernel: Callable[[Any], int],
    struct: type[ctypes.Structure],
    arrays: Sequence[npt.NDArray[Any] | None],
    *numbers: float,
) -> int:
    """Call a kernel with the fields of its struct in order; those behind the last number are 0.

    The kernels check nothing: arrays must be contiguous and of the right type.

    Raises:
        MemoryError: There is no memory for its workspace.
    """
    call = struct(*(None if array is None else array.ctypes.data for array in arrays), *numbers)
    result = kernel(ctypes.byref(call))
    if result < 0:
        raise MemoryError("no memory for the workspace of a late-interaction kernel")
    return result


def aligned(shape: tuple[int, int], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """An array that begins at a cache line, so that its rows lie in as few of them as possible; not initialized."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    room = np.empty(size + _CACHE_LINE, dtype=np.uint8)
    start = -room.ctypes.data % _CACHE_LINE
    return room[start : start + size].view(dtype).reshape(shape)


def thread_count(threads: int | None) -> int:
    """``threads``, or the number of this process."""
    return default_threads() if threads is None else threads
