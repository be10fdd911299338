"""Malloc: the number of glibc's memory arenas for a server's threads."""

from __future__ import annotations

import ctypes
import os

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_ARENAS = 2


def limit_arenas() -> bool:
    """Let all threads share two arenas; returns whether glibc accepted it.

    glibc gives threads that allocate at the same time separate arenas, up to eight per core, and memory freed in one
    is not used by another: a server whose threads take turns at large texts grows by a tenth in an hour.
    ``MALLOC_ARENA_MAX`` takes precedence if it is set. Only the server does this: a process that embeds through
    :class:`millpond.Engine` keeps its own setting.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        done: int = ctypes.CDLL(None).mallopt(_ARENA_MAX, _ARENAS)
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return done == 1
