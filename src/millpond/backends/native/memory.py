"""Memory: what holds packed weights and workspaces."""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 2 << 20  # huge pages
# Else the memory is shared with forked processes, which would write into each other's workspaces, and most systems give
# no huge pages to shared memory.
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def floats_at(address: int, count: int) -> npt.NDArray[np.float32]:
    """Numbers in float32 where they are; whoever owns the memory has to live."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Memory:
    """Zeroed memory outside of Python's heap, on a boundary of 2 MiB and in huge pages where the system has them."""

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, size + _ALIGNMENT, **_PRIVATE)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"no memory for {size} bytes") from error
            raise
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT
        self.size = size
        self.bytes: npt.NDArray[np.uint8] = whole[start : start + size]
        self.address: int = self.bytes.ctypes.data
