"""Arenas: how many pools of memory glibc keeps for a server's threads."""

from __future__ import annotations

import ctypes
import os

_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h
_FEW = 2


def keep_few() -> bool:
    """Let threads share two pools; whether that was done.

    glibc gives each thread that allocates at the same time as others a pool of its own, up to eight for each core, and
    what is freed in one is not used by another: a server whose threads take turns at large texts grows by a tenth in
    an hour. ``MALLOC_ARENA_MAX``, where it is set, goes before this. It is the program's to decide: a process that only
    embeds through :class:`millpond.Engine` keeps what it has.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        done: int = ctypes.CDLL(None).mallopt(_ARENA_MAX, _FEW)
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return done == 1
