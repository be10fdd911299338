"""The write lock of an index: one writer at a time, in all processes; readers take no lock."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millpond.errors import IndexLockedError

LOCK = "LOCK"
# A commit takes milliseconds, an explicit compaction of a large index about a minute.
WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.005


class WriteLock:
    """``flock`` of a file, and a mutex for the threads of this process. The kernel releases it when a process dies.

    The file is created when the lock is first taken, and holds the process id of the last writer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()
        self._fd: int | None = None
        _LOCKS.add(self)

    @contextmanager
    def held(self, seconds: float | None = None) -> Iterator[None]:
        """Hold the lock; IndexLockedError if another writer held it for so long (``None``: a minute) already."""
        seconds = WAIT_SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        if not self._mutex.acquire(timeout=seconds):
            raise self._locked(seconds)
        try:
            self._fd = self._open()
            try:
                while not self._lock_file():
                    if time.monotonic() >= deadline:
                        raise self._locked(seconds)
                    time.sleep(_POLL_SECONDS)
                os.truncate(self._fd, 0)
                os.pwrite(self._fd, str(os.getpid()).encode(), 0)
                yield
            finally:
                # Explicitly: a process that was forked meanwhile has the same lock, and closing would not release it.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
                self._fd = None
        finally:
            self._mutex.release()

    def after_fork(self) -> None:
        """In a forked child: the lock is the parent's, whose threads are not here."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._mutex = threading.Lock()

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}; the index cannot be written, only read: allow writing, or pass another path",
                str(self._path),
            ) from error

    def _lock_file(self) -> bool:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _locked(self, seconds: float) -> IndexLockedError:
        try:
            holder = self._path.read_text() or "unknown"
        except OSError:
            holder = "unknown"
        return IndexLockedError(
            f"index {self._path.parent} is being written by process {holder}, and was for {seconds:g} seconds; "
            "try again when it is done"
        )


_LOCKS: weakref.WeakSet[WriteLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)
