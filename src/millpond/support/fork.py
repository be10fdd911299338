"""Fork: what a forked child finds of its parent's engines, whose threads it does not have.

It must not wait for what those were to settle, import or unlock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from millpond.errors import EngineClosedError, ModelLoadError

Output = TypeVar("Output")

# Most seconds that a fork waits for batches that other threads compute.
_MAX_WAIT = 30.0
_IMPORTED_IN = os.getpid()
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

    A thread that computes holds locks of the process now and then, such as that of torch's cache of oneDNN's kernels. A
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


_loads = _Loads()
_batches = _Batches()


loading = _loads.running
"""Context of loading a model; a child that another thread forks meanwhile cannot load one."""


def computing() -> AbstractContextManager[None]:
    """Context of computing a batch; forks of other threads wait for its end, a while, and it for theirs.

    Call no user's code inside it: that may wait for the thread that forks.
    """
    return _batches


def forked() -> bool:
    """Whether this process was forked since it has imported this module."""
    return os.getpid() != _IMPORTED_IN


def _after_in_child() -> None:
    _loads.after_in_child()
    _batches.renew()
    for lock in list(_locks):
        lock._lock = threading.Lock()
    for future in list(_futures):
        future._fail_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_batches.before_fork, after_in_parent=_batches.after_in_parent, after_in_child=_after_in_child
    )
