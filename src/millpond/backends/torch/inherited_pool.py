"""OpenMP's threads in forked children: a pool for each thread that computes, which only its parent has.

GNU's OpenMP has no way to notice that: an operator of torch waits for the missing threads for ever. This module is
imported before any other of this package, and imports no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from millpond.support.fork import forked

Output = TypeVar("Output")

# OpenMP's omp_pause_hard: free everything that can be made anew.
_PAUSE_HARD = 2


class _OpenMP:
    """Which thread has a pool without threads."""

    def __init__(self) -> None:
        self._paused: set[int] = set()  # threads that fork now and have no pool
        self._stale: int | None = None  # the thread of this process whose pool has threads of the parent only
        self._pid = os.getpid()
        if forked() and "torch._C" in sys.modules:  # the parent may have used torch, but not this backend
            self.after_in_child()

    @property
    def stale(self) -> bool:
        """Whether an operator of torch may wait for ever in the calling thread."""
        return self._stale == threading.get_ident()

    def before_fork(self) -> None:
        """Free the calling thread's pool; the next operator makes it anew, in the parent and in the child."""
        if self.stale or os.getpid() != self._pid:  # it would wait for the threads that are missing
            return
        pause = _pause_function() if "torch._C" in sys.modules else lambda _: 0
        if pause is not None and pause(_PAUSE_HARD) == 0:
            self._paused.add(threading.get_ident())

    def after_in_parent(self) -> None:
        self._paused.discard(threading.get_ident())

    def after_in_child(self) -> None:
        # Not paused: this OpenMP cannot, or the process was forked by C code (uWSGI) that calls only this hook.
        forking = threading.main_thread().ident  # the only thread that a child has at first
        self._stale = None if forking in self._paused else forking
        self._paused = set()
        self._pid = os.getpid()
        atexit.unregister(_replace_static_pool)  # of a child that forks, too
        atexit.register(_replace_static_pool)


def inherited_pool() -> bool:
    """Whether operators of torch may wait for ever in the calling thread, which was forked with OpenMP's pool."""
    return _openmp.stale


def outside_inherited_pool(work: Callable[[], Output]) -> Output:
    """The result of ``work``, called in a new thread if OpenMP cannot be used in this one."""
    if not _openmp.stale:
        return work()
    with ThreadPoolExecutor(1, thread_name_prefix="millpond-fork") as thread:
        return thread.submit(work).result()


def _replace_static_pool() -> None:
    """Let a child end: torch's exit joins the threads of its other pool, which the child does not have.

    That would wait for ever or end in a segmentation fault. Setting the number of threads makes the pool anew.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):  # else it was being imported
        torch.set_num_threads(torch.get_num_threads())


@cache
def _pause_function() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the OpenMP that torch uses, if it has that function of OpenMP 5.0."""
    library = sys.modules["torch._C"].__file__
    try:  # the look-up goes on in the libraries that this one was linked with
        function: Callable[[int], int] = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return function


_openmp = _OpenMP()

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_openmp.before_fork,
        after_in_parent=_openmp.after_in_parent,
        after_in_child=_openmp.after_in_child,
    )
