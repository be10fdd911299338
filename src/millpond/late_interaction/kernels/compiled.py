"""The compiled kernels of approximate search, and what their calls have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millpond.native.library import kernel_table

_CACHE_LINE = 64


def fields(*, pointers: str, integers: str, floats: str = "") -> list[tuple[str, Any]]:
    """The fields of a kernel's arguments: pointers, int64 and float64, in this order, as the struct in C++ has them.

    The kernels check nothing: arrays must be contiguous and of the right type.
    """
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_double))
    return [(name, kind) for names, kind in kinds for name in names.split()]


def compiled(name: str) -> Callable[[Any], int] | None:
    """The kernel of a name, if this processor has it."""
    table = kernel_table()
    return (getattr(table, name, None) or None) if table is not None else None


def run(kernel: Callable[[Any], int], call: ctypes.Structure) -> int:
    """Call a kernel; returns what it returns.

    Raises:
        MemoryError: There is no memory for its workspace.
    """
    result = kernel(ctypes.byref(call))
    if result < 0:
        raise MemoryError("no memory for the workspace of a late-interaction kernel")
    return result


def address(array: npt.NDArray[Any]) -> int:
    """The address of an array's first number."""
    return array.ctypes.data


def contiguous(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The array as the kernels read it; a copy only if it is not so already."""
    return np.ascontiguousarray(array, dtype=dtype)


def aligned(shape: tuple[int, int], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """An array that begins at a cache line, so that its rows lie in as few of them as possible; not initialized."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    room = np.empty(size + _CACHE_LINE, dtype=np.uint8)
    start = -address(room) % _CACHE_LINE
    return room[start : start + size].view(dtype).reshape(shape)


def thread_count(threads: int | None) -> int:
    """``threads``, or as many as torch uses."""
    return torch.get_num_threads() if threads is None else threads


class _Alias:
    """The memory of an array, called writable: torch warns of memory that is not, though nothing here writes to it."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the same memory, read-only or not; copied if its columns are not contiguous."""
    return torch.from_numpy(np.asarray(_Alias(np.ascontiguousarray(array))))
