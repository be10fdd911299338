"""Heap: the memory that a long run has freed, given back to the system from time to time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from time import monotonic, perf_counter

# A call of fewer texts is somebody's who waits: it neither frees much nor is to be held up.
_BULK_TEXTS = 512
_SECONDS_APART = 5.0
# Trimming takes at most a hundredth of the time: tens of milliseconds, and the pages are faulted in again.
_TIMES_APART = 100.0


class Heap:
    """Trims glibc's heap while calls of many texts are finished.

    The activations of a batch have sizes of their own, so freed blocks fit the next batch badly, and a little more of
    the heap is touched with every batch: after a few hundred thousand short texts twice as much memory is resident as
    is ever in use. Blocks mapped one by one would leave nothing behind, but make a forward a sixth slower.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        """``trim`` gives free memory back; ``None``: glibc's ``malloc_trim``, or nothing with another C library."""
        self._trim = trim or _malloc_trim()
        self._lock = threading.Lock()
        self._next = monotonic() + _SECONDS_APART

    def finished(self, texts: int) -> None:
        """A call of so many texts is over."""
        if self._trim is None or texts < _BULK_TEXTS or monotonic() < self._next:
            return
        if not self._lock.acquire(blocking=False):  # another thread does it
            return
        try:
            begun = perf_counter()
            self._trim()
            self._next = monotonic() + max(_SECONDS_APART, _TIMES_APART * (perf_counter() - begun))
        finally:
            self._lock.release()


def _malloc_trim() -> Callable[[], object] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return None
    function.argtypes = [ctypes.c_size_t]
    return lambda: function(0)
