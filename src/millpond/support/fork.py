"""Fork: what a forked child finds of its parent's engines, whose threads it does not have.

It must not wait for what those were to settle, import or unlock. Importing this module does not import torch.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

from millpond.errors import EngineClosedError, ModelLoadError

Output = TypeVar("Output")

# Most seconds that a fork waits for batches that other threads compute.
_MAX_WAIT = 30.0
# OpenMP's omp_pause_hard: free everything that can be made anew.
_PAUSE_HARD = 2
# States of a future.
_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)
_DONE = (*_CANCELLED, FINISHED)


class ProcessFuture(Future[Output]):
    """A future that a thread of this process settles; in a forked child it fails with EngineClosedError."""

    def __init__(self) -> None:
        super().__init__()
        _futures.add(self)

    def done(self) -> bool:
        """As of any future, without its lock: one attribute is read, and an engine asks several times for each text."""
        return self._state in _DONE

    def failure(self) -> BaseException | None:
        """The error of a future that is done, CancelledError included; ``None`` if it has a result. Takes no lock."""
        return CancelledError() if self._state in _CANCELLED else self._exception

    def _fail_in_child(self) -> None:
        """Fail if it is not done; without its callbacks, which the parent calls."""
        self._condition = threading.Condition()  # a thread of the parent may have held the lock
        self._done_callbacks: list[Any] = []
        for waiter in self._waiters:  # of as_completed() in the thread that forked
            waiter.lock = threading.Lock()  # type: ignore[attr-defined]  # it has one
        if self._state == CANCELLED:
            self.set_running_or_notify_cancel()  # wakes threads that wait for several futures
        elif not self.done():
            self.set_exception(
                EngineClosedError(
                    f"this result was to come from process {os.getppid()} and does not survive a fork; load an engine "
                    'after forking and make the call again, or start workers with the "spawn" method'
                )
            )


_futures: weakref.WeakSet[ProcessFuture[Any]] = weakref.WeakSet()


class ProcessLock:
    """A lock that is free in a forked child, though another thread of its parent held it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        """Wait for the lock, and hold it."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._lock.release()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


class _Loads:
    """The models that are being loaded: a child cannot finish the import of a thread that it does not have."""

    def __init__(self) -> None:
        self._threads: list[int] = []  # one entry for each load; loads may be inside each other
        self._cut_off = False  # whether this process was forked during a load of another thread

    @contextmanager
    def running(self) -> Iterator[None]:
        """A load in the calling thread."""
        if self._cut_off:
            raise ModelLoadError(
                "this process was forked while another thread loaded a model, and cannot load one itself; fork before "
                'or after loading, or start workers with the "spawn" method'
            )
        self._threads.append(threading.get_ident())
        try:
            yield
        finally:
            self._threads.remove(threading.get_ident())

    def after_in_child(self) -> None:
        own = [thread for thread in self._threads if thread == threading.get_ident()]
        self._cut_off = self._cut_off or len(own) < len(self._threads)
        self._threads = own


class _Batches:
    """The batches that are being computed. Forks wait for them, and they for forks.

    A thread that computes holds locks of the process now and then, above all the lock of oneDNN's cache of kernels. A
    child that finds one held waits for ever when it computes itself.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Nothing runs; in a forked child, whose parent's threads may have held the lock."""
        self._changed = threading.Condition()
        self._running = 0
        self._forking = 0

    def __enter__(self) -> None:
        """A batch begins."""
        with self._changed:
            if self._forking:
                self._changed.wait_for(lambda: not self._forking, timeout=_MAX_WAIT)
            self._running += 1

    def __exit__(self, *_: object) -> None:
        """It is over."""
        with self._changed:
            self._running -= 1
            if self._forking:
                self._changed.notify_all()

    def before_fork(self) -> None:
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._running, timeout=_MAX_WAIT)

    def after_in_parent(self) -> None:
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()


class _OpenMP:
    """OpenMP's threads, a pool for each thread that computes; GNU's has no way to notice that a child lacks them."""

    def __init__(self) -> None:
        self._paused: set[int] = set()  # threads that fork now and have no pool
        self._stale: int | None = None  # the thread of this process whose pool has threads of the parent only
        self._pid = os.getpid()

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
        self._stale = None if threading.get_ident() in self._paused else threading.get_ident()
        self._paused = set()
        self._pid = os.getpid()
        atexit.unregister(_replace_static_pool)  # of a child that forks, too
        atexit.register(_replace_static_pool)


_loads = _Loads()
_batches = _Batches()
_openmp = _OpenMP()


loading = _loads.running
"""Context of importing torch and loading a model; a child that another thread forks meanwhile cannot load one."""


def computing() -> AbstractContextManager[None]:
    """Context of calls into torch's libraries; forks of other threads wait for its end, a while, and it for theirs.

    Call no user's code inside it: that may wait for the thread that forks.
    """
    return _batches


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


def _before_fork() -> None:
    _batches.before_fork()
    _openmp.before_fork()


def _after_in_parent() -> None:
    _openmp.after_in_parent()
    _batches.after_in_parent()


def _after_in_child() -> None:
    _openmp.after_in_child()
    _loads.after_in_child()
    _batches.renew()
    for lock in list(_locks):
        lock._lock = threading.Lock()
    for future in list(_futures):
        future._fail_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
