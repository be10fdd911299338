"""SqliteFile: a sqlite database with private permissions, a format check, migrations, pooling and fork safety."""

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
    "synchronous=NORMAL",  # with WAL: a crash loses no committed transaction, a power failure at most the last ones
    "wal_autocheckpoint=4000",  # pages (16 MiB): keys are random, so fewer checkpoints write less
    f"journal_size_limit={1 << 26}",
    "secure_delete=OFF",
    "trusted_schema=OFF",  # views and triggers of a manipulated file cannot call functions
)


class SqliteFile:
    """A pool of connections to one file, which threads and processes can share.

    :meth:`connection` turns errors of the file, the disk or another process into a
    :class:`~millpond.errors.CacheError` that names the path and what to do.

    Attributes:
        path: The file.
    """

    busy_timeout: ClassVar[float] = 30.0  # seconds to wait for another process's transaction

    def __init__(self, path: Path, *, application_id: int, migrations: Sequence[Sequence[str]]) -> None:
        """Open ``path``, or create it.

        Args:
            path: An absolute path on a local disk.
            application_id: Number in the file header that identifies our files.
            migrations: Script ``i`` migrates from schema version ``i`` to ``i + 1``; version 0 is an empty file.
        """
        self.path = path
        self._pid = os.getpid()
        self._closed = self._forking = False
        # Pooled instead of one per thread, so that a thread that ends leaves no open connection.
        self._idle: list[sqlite3.Connection] = []
        self._borrowed = 0
        self._pool = threading.Condition()
        self._writing = (
            threading.Lock()
        )  # threads of this process queue here, which is fairer and faster than sqlite's polling
        with _as_cache_errors(path):
            _create(path)
        with self.connection() as connection:
            _recognize(connection, path, application_id)
            _migrate(connection, path, application_id, migrations)
            _use_wal(connection, path)
        _hook_fork(self)

    @property
    def open(self) -> bool:
        """Whether the file is open in this process."""
        return not self._closed and self._pid == os.getpid()

    def close(self) -> None:
        """Close all connections; those in use are closed when they are returned."""
        if self.open:
            with self._pool:
                self._closed = True
                self._close_idle()

    @contextmanager
    def connection(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Borrow a connection from the pool; after an error it is closed instead of returned.

        Without ``wait``, a transaction of another process raises at once.
        """
        self._check_process()
        with self._pool:
            self._pool.wait_for(lambda: not self._forking)
            if self._closed:
                raise CacheError(f"the cache {self.path} is closed; open it again")
            connection = self._idle.pop() if self._idle else None
            self._borrowed += 1
        healthy = False
        try:
            with _as_cache_errors(self.path):
                if connection is None:
                    connection = _connect(self.path)
                connection.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000) if wait else 0}")
                yield connection
            healthy = True
        finally:
            with self._pool:
                self._borrowed -= 1
                if healthy and not self._closed and connection is not None:
                    self._idle.append(connection)
                elif connection is not None:
                    connection.close()
                self._pool.notify_all()

    @contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Borrow a connection in a write transaction: committed at the end, rolled back after any error."""
        self._check_process()  # first: after a fork the lock may be held by a thread of the parent
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

    # sqlite records locks per process, and a fork copies the record: a child that opens the file again while a
    # connection was open here would assume locks that it does not hold. So no connection is open during a fork.

    def _before_fork(self) -> None:
        with self._pool:
            self._forking = True
            self._pool.wait_for(lambda: self._borrowed == 0, timeout=self.busy_timeout)
            self._close_idle()

    def _after_fork(self) -> None:
        with self._pool:
            self._forking = False
            self._pool.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _hook_fork(file: SqliteFile) -> None:
    """Register fork hooks, which cannot be removed and therefore hold a weak reference."""
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
def _as_cache_errors(path: Path) -> Iterator[None]:
    """Raise errors of sqlite and the system as CacheError, with the path, the problem and what to do."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a bug of ours
        raise
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without extensions
        raise CacheError(f"{path} {_REASONS.get(code, f'is damaged; {WAY_OUT}')} ({error})") from error
    except UnicodeDecodeError as error:  # sqlite quoted damaged data in its message
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
    """Create an empty file with private permissions if there is none.

    It is created under another name and linked, because closing any descriptor of a file drops all locks of this
    process on it, and sqlite in another thread may already hold some.
    """
    if path.exists():
        if not path.is_file():
            raise CacheError(f"{path} is not a file; choose another path")
        size = path.stat().st_size
        if size == 0:
            path.chmod(0o600)
        elif size < 512:  # sqlite's smallest page; sqlite would treat a file of one byte as empty
            raise CacheError(f"{path} {_REASONS[sqlite3.SQLITE_NOTADB]}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was faster
    except OSError:  # the file system has no hard links
        path.touch(mode=0o600)
    finally:
        os.unlink(draft)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",  # a removed file is an error, instead of a new file without tables
        uri=True,
        timeout=SqliteFile.busy_timeout,
        isolation_level=None,
        check_same_thread=False,  # only one thread at a time borrows it
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _recognize(connection: sqlite3.Connection, path: Path, application_id: int) -> None:
    """Refuse databases of other applications before writing to them; an empty file is accepted."""
    (pages,) = connection.execute(
        "PRAGMA page_count"
    ).fetchone()  # before the id, in case another process is just creating it
    (file_id,) = connection.execute("PRAGMA application_id").fetchone()
    if pages > 0 and file_id != application_id:
        raise CacheError(f"{path} is a database of another application; choose another path, or delete it")


def _migrate(
    connection: sqlite3.Connection, path: Path, application_id: int, migrations: Sequence[Sequence[str]]
) -> None:
    """Migrate the schema to the newest version, in one transaction."""
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
    """Switch to write-ahead logging, where readers and the writer do not block each other. The file stores the mode."""
    deadline = time.monotonic() + SqliteFile.busy_timeout
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError as error:  # busy_timeout does not apply to this pragma
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise CacheError(f"{path} is on a disk without shared memory maps; choose a path on a local disk")
