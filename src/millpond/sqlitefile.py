"""SqliteFile: one database of ours, opened safely: private, recognized, migrated, shared, and closed around a fork."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import ClassVar

from millpond.errors import CacheError

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
    "synchronous=NORMAL",  # with the log: a crash loses nothing committed, a power cut at most the last transactions
    "wal_autocheckpoint=4000",  # 16 MiB: keys are random, so fewer checkpoints write less
    f"journal_size_limit={1 << 26}",
    "secure_delete=OFF",
    "trusted_schema=OFF",  # a doctored file's views and triggers call no functions
)


class SqliteFile:
    """A pool of connections to one file, which threads and processes may share.

    Every block of :meth:`connection` turns what the file, the disk or another process does wrong into a
    :class:`~millpond.errors.CacheError` that names the path and the way out.

    Attributes:
        path: The file.
    """

    busy_timeout: ClassVar[float] = 30.0  # seconds to wait for another process's transaction

    def __init__(self, path: Path, *, application_id: int, migrations: Sequence[Sequence[str]]) -> None:
        """Open ``path``, or make it.

        Args:
            path: An absolute path on a local disk.
            application_id: What marks the file as ours, in its header.
            migrations: Script ``i`` leads from schema version ``i`` to ``i + 1``; version 0 is an empty file.
        """
        self.path = path
        self._pid = os.getpid()
        self._closed = self._forking = False
        # Pooled, not kept per thread: a thread that ends leaves no connection open behind it.
        self._idle: list[sqlite3.Connection] = []
        self._lent = 0
        self._pool = threading.Condition()
        self._writing = threading.Lock()  # our own threads queue here: fairer and faster than sqlite's polling
        with _reported(path):
            _create(path)
        with self.connection() as connection:
            _recognize(connection, path, application_id)
            _migrate(connection, path, application_id, migrations)
            _use_wal(connection, path)
        _hook_fork(self)

    @property
    def open(self) -> bool:
        """Whether :meth:`connection` would lend one."""
        return not self._closed and self._pid == os.getpid()

    def close(self) -> None:
        """Close the connections, those lent out as they come back."""
        if self.open:
            with self._pool:
                self._closed = True
                self._close_idle()

    @contextmanager
    def connection(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection lent from the pool; one that saw an error is closed instead of returned.

        Without ``wait`` another process's transaction is an error at once.
        """
        self._check_process()
        with self._pool:
            self._pool.wait_for(lambda: not self._forking)
            if self._closed:
                raise CacheError(f"the cache {self.path} is closed; open it again")
            connection = self._idle.pop() if self._idle else None
            self._lent += 1
        healthy = False
        try:
            with _reported(self.path):
                if connection is None:
                    connection = _connect(self.path)
                connection.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000) if wait else 0}")
                yield connection
            healthy = True
        finally:
            with self._pool:
                self._lent -= 1
                if healthy and not self._closed and connection is not None:
                    self._idle.append(connection)
                elif connection is not None:
                    connection.close()
                self._pool.notify_all()

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection within a write transaction: committed at the end, rolled back by any error."""
        self._check_process()  # first: after a fork the lock may be held by a thread that is not here
        if not self._writing.acquire(blocking=wait):
            raise CacheError(f"{self.path} is being written by another thread; wait for it")
        try:
            with self.connection(wait=wait) as connection, _transaction(connection):
                yield connection
        finally:
            self._writing.release()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise CacheError(
                f"the cache {self.path} was opened by process {self._pid} and does not survive a fork into "
                f"{os.getpid()}; open it again in the new process"
            )

    # sqlite's bookkeeping of locks is per process and copied by a fork: a child that opened the file again while a
    # connection was open here would believe to hold locks it does not. So none is open while a fork happens.

    def _before_fork(self) -> None:
        with self._pool:
            self._forking = True
            self._pool.wait_for(lambda: self._lent == 0, timeout=self.busy_timeout)
            self._close_idle()

    def _after_fork(self) -> None:
        with self._pool:
            self._forking = False
            self._pool.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _hook_fork(file: SqliteFile) -> None:
    """Hooks stay registered for good, so they hold it weakly."""
    reference = weakref.ref(file)

    def hook(method: Callable[[SqliteFile], None]) -> Callable[[], None]:
        def call() -> None:
            target = reference()
            if target is not None and target._pid == os.getpid():
                method(target)

        return call

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=hook(SqliteFile._before_fork), after_in_parent=hook(SqliteFile._after_fork))


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """sqlite's and the system's errors as CacheError: the path, what is wrong with it, and the way out."""
    try:
        yield
    except sqlite3.ProgrammingError:  # ours
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte: extended codes refine it
        raise CacheError(f"{path} {_REASONS.get(code, f'is damaged; {WAY_OUT}')} ({error})") from error
    except UnicodeDecodeError as error:  # sqlite quoted damage in its message
        raise CacheError(f"{path} {_REASONS[sqlite3.SQLITE_CORRUPT]}") from error
    except OSError as error:
        raise CacheError(f"{path} {_REASONS[sqlite3.SQLITE_CANTOPEN]} ({error})") from error


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _create(path: Path) -> None:
    """Where there is no file, an empty one, private from its first moment.

    It is made under another name and linked, since closing a descriptor of a file drops the locks that this process
    has on it, and another thread's sqlite may already have some.
    """
    if path.exists():
        if not path.is_file():
            raise CacheError(f"{path} is not a file; choose another path")
        size = path.stat().st_size
        if size == 0:
            path.chmod(0o600)
        elif size < 512:  # sqlite's smallest page; it takes a file of one byte for an empty one
            raise CacheError(f"{path} {_REASONS[sqlite3.SQLITE_NOTADB]}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
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
        f"{path.as_uri()}?mode=rw",  # a file removed meanwhile is an error, not a new file without tables
        uri=True,
        timeout=SqliteFile.busy_timeout,
        isolation_level=None,
        check_same_thread=False,  # the pool lends it to one thread at a time
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _recognize(connection: sqlite3.Connection, path: Path, application_id: int) -> None:
    """Refuse what is not ours before anything is written to it. An empty file is nobody's, and taken."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()  # before the id, lest a file just made seem foreign
    (found,) = connection.execute("PRAGMA application_id").fetchone()
    if pages > 0 and found != application_id:
        raise CacheError(f"{path} is a database of another application; choose another path, or delete it")


def _migrate(
    connection: sqlite3.Connection, path: Path, application_id: int, migrations: Sequence[Sequence[str]]
) -> None:
    """Bring the schema to this version, in one transaction."""
    newest = len(migrations)
    if connection.execute("PRAGMA user_version").fetchone()[0] < newest:
        with _transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()  # another process may have been faster
            for statement in chain.from_iterable(migrations[version:]):
                connection.execute(statement)
            if version < newest:
                connection.execute(f"PRAGMA application_id={application_id}")
                connection.execute(f"PRAGMA user_version={newest}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > newest:
        raise CacheError(
            f"{path} has schema version {version}, and this millpond reads up to {newest}; "
            "upgrade millpond, choose another path, or delete it"
        )


def _use_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Write-ahead logging: readers and the writer do not wait for each other. Stored in the file, once."""
    deadline = time.monotonic() + SqliteFile.busy_timeout
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError as error:  # sqlite does not wait by itself for this one
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise CacheError(f"{path} is on a disk without shared memory maps; choose a path on a local disk")
