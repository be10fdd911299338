"""SqliteFile: a sqlite database opened safely: private, identified, migrated, shared, and closed during a fork."""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import ClassVar

from millpond.cache.errors import CacheFileError
from millpond.errors import CacheError

logger = logging.getLogger(__name__)

WAY_OUT = "delete it, or choose another path"
_REASONS = {
    sqlite3.SQLITE_NOTADB: f"is not a millpond cache, or is damaged; {WAY_OUT}",
    sqlite3.SQLITE_CORRUPT: f"is damaged; {WAY_OUT}",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full; free some space, set max_bytes, or choose another path",
    sqlite3.SQLITE_IOERR: "cannot be read or written; check the disk, its quota and its space, or choose another path",
    sqlite3.SQLITE_READONLY: "cannot be written; make it and its folder writable, or choose another path",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; make it and its folder writable, or choose another path",
    sqlite3.SQLITE_PERM: "cannot be opened; make it and its folder writable, or choose another path",
    sqlite3.SQLITE_BUSY: "is locked by another process; wait for it or end it, or choose another path",
    sqlite3.SQLITE_LOCKED: "is locked by another process; wait for it or end it, or choose another path",
}
_PRAGMAS = (
    "synchronous=NORMAL",  # with the log: a crash loses no committed transaction, a power cut at most the last ones
    "wal_autocheckpoint=4000",  # 16 MiB: keys are random, so fewer checkpoints write fewer pages
    f"journal_size_limit={1 << 26}",
    "secure_delete=OFF",
    "trusted_schema=OFF",  # views and triggers of a manipulated file call no functions
)


class SqliteFile:
    """A pool of connections to one file, which threads and processes may share.

    Inside :meth:`connection`, errors caused by the file, the disk or another process are raised as
    :class:`CacheFileError` with the path and the way out. A file that was deleted or replaced is opened, or created,
    again: what is written to an open file without a name would be lost.

    A file is recognized by the ``application_id`` in its header. Script ``i`` of ``migrations`` migrates from schema
    version ``i`` to ``i + 1``; version 0 is an empty file.
    """

    busy_timeout: ClassVar[float] = 30.0  # seconds to wait for a transaction of another process
    # The same, after a wait in vain: a file that stays locked must not take 30 seconds of every transaction.
    locked_timeout: ClassVar[float] = 0.5

    def __init__(self, path: Path, *, application_id: int, migrations: Sequence[Sequence[str]]) -> None:
        self.path = path
        self._application_id = application_id
        self._migrations = migrations
        self._pid = os.getpid()
        self._closed = self._forking = self._locked = False
        # A pool, not one connection per thread: a thread that ends leaves no connection open.
        self._idle: list[sqlite3.Connection] = []
        self._in_use = 0
        self._pool = threading.Condition()
        self._writing = threading.Lock()  # threads of this process queue here: fairer and faster than sqlite's polling
        self._opening = threading.Lock()
        self._identity: tuple[int, int] | None = None  # device and inode of the file that the connections are to
        self._open_file()
        self._hook_fork()

    def _open_file(self) -> None:
        """Create the file if it does not exist, check whose it is, and migrate it."""
        with _as_cache_errors(self.path):
            _create(self.path)
            identity = _identity_of(self.path)
            connection = _connect(self.path)
            try:
                self._migrate(connection)
                _use_wal(connection, self.path)
            except BaseException:
                connection.close()
                raise
        with self._pool:
            self._identity = identity
            self._idle.append(connection)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Migrate the schema to the newest version in one transaction.

        A database of another application, or of a newer schema, is a CacheError before anything is written to it.
        """
        # The pages first: if another process sets up the file between the two, it does not look foreign.
        if pragma(connection, "page_count") > 0 and pragma(connection, "application_id") != self._application_id:
            raise CacheFileError(f"{self.path} is a database of another application; choose another path, or delete it")
        newest = len(self._migrations)
        if pragma(connection, "user_version") < newest:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                version = pragma(connection, "user_version")  # another process may have been faster
                for statement in chain.from_iterable(self._migrations[version:]):
                    connection.execute(statement)
                if version < newest:
                    connection.execute(f"PRAGMA application_id={self._application_id}")
                    connection.execute(f"PRAGMA user_version={newest}")
        version = pragma(connection, "user_version")
        if version > newest:
            raise CacheFileError(
                f"{self.path} has schema version {version}, and this millpond reads up to {newest}; "
                "upgrade millpond, choose another path, or delete it"
            )

    def _follow(self) -> None:
        """Open the file again if there is another one, or none, under its name."""
        if _identity_of(self.path) == self._identity:
            return
        with self._opening:
            if _identity_of(self.path) == self._identity or self._closed:
                return
            with self._pool:
                self._close_idle()  # first: sqlite must not take the old file's log for the new one's
            self._open_file()
            logger.warning("%s was deleted or replaced while it was open; what it held is lost", self.path)

    def close(self) -> None:
        """Close the connections; those in use are closed when they are returned. In the child of a fork: nothing."""
        if self._pid == os.getpid():
            with self._pool:
                self._closed = True
                self._close_idle()

    @contextmanager
    def connection(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection from the pool, returned to it afterwards; after an error it is closed instead.

        Without ``wait``, a transaction of another process is an error at once.
        """
        self._check_process()
        with self._pool:
            self._pool.wait_for(lambda: not self._forking)
            if self._closed:
                raise CacheError(f"the cache {self.path} is closed; open it again")
            self._in_use += 1
        connection: sqlite3.Connection | None = None
        identity: tuple[int, int] | None = None
        healthy = False
        try:
            with _as_cache_errors(self.path):
                self._follow()
                with self._pool:
                    identity = self._identity
                    connection = self._idle.pop() if self._idle else None
                if connection is None:
                    connection = _connect(self.path)
                seconds = min(self.locked_timeout, self.busy_timeout) if self._locked else self.busy_timeout
                connection.execute(f"PRAGMA busy_timeout={int(seconds * 1000) if wait else 0}")
                yield connection
            healthy = True
        finally:
            with self._pool:
                self._in_use -= 1
                if healthy and not self._closed and connection is not None and identity == self._identity:
                    self._idle.append(connection)
                elif connection is not None:
                    connection.close()
                self._pool.notify_all()

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection in a write transaction: committed at the end, rolled back on any error."""
        self._check_process()  # first: after a fork the lock may be held by a thread that does not exist here
        if not self._writing.acquire(blocking=wait):
            raise CacheError(f"{self.path} is being written by another thread; wait for it")
        try:
            with self.connection(wait=wait) as connection:
                connection.execute("BEGIN IMMEDIATE")
                with connection:
                    yield connection
            self._locked = False
        except CacheFileError as error:
            self._locked = _code(error.__cause__) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise
        finally:
            self._writing.release()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise CacheError(
                f"the cache {self.path} was opened by process {self._pid} and does not survive a fork into "
                f"{os.getpid()}; open it again in the new process"
            )

    # sqlite tracks its locks per process, and a fork copies that state: a child that opens the file again while the
    # parent has a connection open assumes locks that it does not hold. So no connection is open during a fork.

    def _hook_fork(self) -> None:
        """Hooks stay registered forever, so they hold the file by weak references."""
        if hasattr(os, "register_at_fork"):  # not on Windows
            before, after = weakref.WeakMethod(self._before_fork), weakref.WeakMethod(self._after_fork)
            os.register_at_fork(before=lambda: _call(before()), after_in_parent=lambda: _call(after()))

    def _before_fork(self) -> None:
        if self._pid == os.getpid():
            with self._pool:
                self._forking = True
                self._pool.wait_for(lambda: self._in_use == 0, timeout=self.busy_timeout)
                self._close_idle()

    def _after_fork(self) -> None:
        if self._pid == os.getpid():
            with self._pool:
                self._forking = False
                self._pool.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """A number that sqlite keeps of a file."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()


def is_damage(error: CacheError) -> bool:
    """Whether an error inside :meth:`SqliteFile.connection` comes from the file's content, not from its use."""
    cause, code = error.__cause__, _code(error.__cause__)
    known = code in _REASONS and code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return isinstance(cause, UnicodeDecodeError) or (isinstance(cause, sqlite3.Error) and not known)


def _code(error: BaseException | None) -> int:
    """sqlite's primary error code: the low byte, which extended codes refine; 0 for another error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file, if there is one."""
    with suppress(FileNotFoundError):
        info = path.stat()
        return info.st_dev, info.st_ino
    return None


@contextmanager
def _as_cache_errors(path: Path) -> Iterator[None]:
    """Raise errors of sqlite and the system as CacheError, with the path, the problem and the way out."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a bug in this code
        raise
    except sqlite3.Error as error:
        raise CacheFileError(f"{path} {_REASONS.get(_code(error), f'is damaged; {WAY_OUT}')} ({error})") from error
    except UnicodeDecodeError as error:  # sqlite's message quotes damaged bytes
        raise CacheFileError(f"{path} {_REASONS[sqlite3.SQLITE_CORRUPT]}") from error
    except OSError as error:
        raise CacheFileError(f"{path} {_REASONS[sqlite3.SQLITE_CANTOPEN]} ({error})") from error


def _create(path: Path) -> None:
    """Create an empty file, private from the start, if it does not exist.

    It is created under another name and linked: closing a descriptor of a file drops all locks of this process on it,
    and sqlite in another thread may already hold some.
    """
    if path.exists():
        if not path.is_file():
            raise CacheFileError(f"{path} is not a file; choose another path")
        size = path.stat().st_size
        if size == 0:
            path.chmod(0o600)
        elif size < 512:  # sqlite's smallest page; sqlite itself accepts a file of one byte as empty
            raise CacheFileError(f"{path} {_REASONS[sqlite3.SQLITE_NOTADB]}")
        return
    if not path.parent.is_dir():  # not created: the path may be misspelt
        raise CacheFileError(
            f"cache={str(path)!r}: there is no folder {str(path.parent)!r}; create it first, or choose another path"
        )
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was faster
    except OSError:  # no hard links on this disk
        path.touch(mode=0o600)
    finally:
        os.unlink(draft)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",  # a file removed in the meantime is an error, not a new file without tables
        uri=True,
        timeout=SqliteFile.busy_timeout,
        isolation_level=None,
        check_same_thread=False,  # the pool gives it to one thread at a time
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Switch to write-ahead logging, which the file remembers: readers and the writer do not wait for each other."""
    deadline = time.monotonic() + SqliteFile.busy_timeout
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError as error:  # sqlite does not apply its timeout here
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise CacheFileError(f"{path} is on a disk without shared memory maps; choose a path on a local disk")
