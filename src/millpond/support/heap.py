"""Heap: glibc's memory, held together and given back to the system; with another C library nothing happens."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from time import monotonic, perf_counter

# Skip small calls: they free little, and their caller is waiting.
_BULK_TEXTS = 512
_SECONDS_APART = 5.0
# Trimming takes at most a hundredth of the time: tens of milliseconds, and the pages are faulted in again.
_TIMES_APART = 100.0
# Seconds from the last large text until its memory is given back: by then its request is over, and so are those that
# came with it.
_SOON_SECONDS = 1.0
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_ARENAS = 2


class Heap:
    """Trims glibc's heap soon after large texts, and now and then while calls of many texts finish.

    The activations of a batch have sizes of their own, so freed blocks fit the next batch badly, and a little more of
    the heap is touched with every batch: after a few hundred thousand short texts twice as much memory is resident as
    is ever in use. Blocks mapped one by one would leave nothing behind, but make a forward a sixth slower.
    """

    def __init__(self, trim: Callable[[], object] | None = None) -> None:
        """``trim`` gives free memory back; ``None``: glibc's ``malloc_trim``, or nothing with another C library."""
        release = _glibc("malloc_trim")
        self._trim = trim or (None if release is None else lambda: release(ctypes.c_size_t(0)))
        self._next = monotonic() + _SECONDS_APART
        self._timer: threading.Timer | None = None

    def finished(self, texts: int) -> None:
        """A call of so many texts is over."""
        if self._trim is None or texts < _BULK_TEXTS or monotonic() < self._next:
            return
        self._next = monotonic() + _SECONDS_APART  # other threads do not trim meanwhile
        begun = perf_counter()
        self._trim()
        self._next = monotonic() + max(_SECONDS_APART, _TIMES_APART * (perf_counter() - begun))

    def trim_soon(self) -> None:
        """Give the memory that is free by then back, once for all large texts of a moment."""
        timer = self._timer
        if self._trim is None or (timer is not None and timer.is_alive()):  # a forked child's is not
            return
        timer = threading.Timer(_SOON_SECONDS, self._trim_now)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the program ends
            return
        self._timer = timer

    def _trim_now(self) -> None:
        self._timer = None
        if self._trim is not None:
            self._trim()


def limit_arenas() -> bool:
    """Let all threads share two arenas; returns whether glibc accepted it.

    glibc gives threads that allocate at the same time separate arenas, up to eight per core, and memory freed in one
    is not used by another: a server whose threads take turns at large texts grows by a tenth in an hour.
    ``MALLOC_ARENA_MAX`` takes precedence if it is set. Only the server does this: a process that embeds through
    :class:`millpond.Engine` keeps its own setting.
    """
    function = None if "MALLOC_ARENA_MAX" in os.environ else _glibc("mallopt")
    return function is not None and function(_ARENA_MAX, _ARENAS) == 1


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc; ``None`` with musl, and on macOS and Windows."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    return function


HEAP = Heap()
"""The process's."""
