"""CachedIndex: the files of a folder's index in the cache folder, kept while a process uses them."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

UNUSED_DAYS, GONE_DAYS = 90, 7
"""Days without a use after which an index is removed; the second of a folder that is gone: a disk may come back."""

_DAY = 86_400
_MARK = ".use"
# The database first: sqlite drops a log without one. The mark last: the next start completes a removal that was killed.
_FILES = (".db", ".db-wal", ".db-shm", ".lock", _MARK)


class CachedIndex:
    """The files of one index, of which the mark says whose it is, when it was used last, and who uses it.

    The mark holds the folder's path, and its time is that of the last use. Every process that uses the index has a
    shared ``flock`` of it, which the kernel releases when the process dies; one that removes the index has an
    exclusive lock.

    Args:
        path: The database.
        root: The folder.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._mark: int | None = _held(path.with_suffix(_MARK))
        os.pwrite(self._mark, os.fsencode(root), 0)
        self.touch()

    def touch(self) -> None:
        """Note that it is used now."""
        if self._mark is not None:
            os.utime(self._mark)

    def release(self) -> None:
        """Let another process remove it, when its time has come."""
        if self._mark is not None:
            self.touch()
            os.close(self._mark)
            self._mark = None


def remove_unused(folder: Path) -> None:
    """Remove the indexes of a cache folder that nobody has used for a long time, but none that a process uses now."""
    found = {path.with_suffix(".db") for pattern in ("*.db", f"*{_MARK}") for path in folder.glob(pattern)}
    for path in sorted(found):
        try:
            _remove_if_unused(path)
        except OSError as error:  # of another user, or the disk's: this start can do without
            logger.warning("the unused index %s cannot be removed: %s", path, error)


def _remove_if_unused(path: Path) -> None:
    mark = path.with_suffix(_MARK)
    if not _is_unused(path):
        return
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(descriptor, mark) or not _is_unused(path):  # removed, or used and released, in the meantime
            return
        logger.info("removing %s, the index of %s, which is not used", path, _root_of(mark) or "a folder")
        for suffix in _FILES:
            path.with_suffix(suffix).unlink(missing_ok=True)
    except BlockingIOError:
        return  # a process uses it
    finally:
        os.close(descriptor)


def _is_unused(path: Path) -> bool:
    """Whether its time has come. Without a mark, which older versions did not make, the database's time counts."""
    root = _root_of(path.with_suffix(_MARK))
    times = [0.0]
    for suffix in (".db",) if root is None else (".db", _MARK):  # an empty mark is that of a removal
        with suppress(FileNotFoundError):
            times.append(path.with_suffix(suffix).stat().st_mtime)
    days = (time.time() - max(times)) / _DAY
    gone = root is not None and not os.path.isdir(root)
    return days > (GONE_DAYS if gone else UNUSED_DAYS)


def _root_of(mark: Path) -> str | None:
    with suppress(FileNotFoundError):
        return os.fsdecode(mark.read_bytes()) or None
    return None


def _held(mark: Path) -> int:
    """A descriptor of the mark with a shared lock; waits for a process that removes the index."""
    while True:
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_at(descriptor, mark):
            return descriptor
        os.close(descriptor)  # of an index that was removed


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
