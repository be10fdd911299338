"""repair_cache: the intact vectors of a damaged cache in a new file, and the damaged one beside it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from millpond.cache.blob_rows import BlobRow, read_rows, read_ticks
from millpond.cache.blob_store import APPLICATION_ID, MIGRATIONS
from millpond.cache.sqlitefile import SqliteFile, is_damage
from millpond.cache.vector_cache import VectorCache
from millpond.errors import CacheError
from millpond.progress import draw_bar

_LOCK_BYTES = (0x40000000, 512)  # where sqlite locks a file, and how many bytes
_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True)
class CacheRepair:
    """The result of :func:`repair_cache`.

    Attributes:
        rows: Vectors in the file now.
        lost: Vectors that were damaged, and are left out; those of pages of which nothing is left are not counted.
        damaged_file: Where the damaged file is now; None: nothing was wrong, and nothing was changed.
    """

    rows: int
    lost: int
    damaged_file: Path | None


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """The result of :func:`describe_cache`.

    Attributes:
        rows: Vectors.
        widths: Number of vectors by their number of floats.
        bytes: Bytes of the file in use.
        free_bytes: Bytes of the file that are not in use; the next vectors fill them.
        wal_bytes: Bytes of the write-ahead log beside it.
        in_use: Whether another process has the file open.
    """

    rows: int
    widths: dict[int, int]
    bytes: int
    free_bytes: int
    wal_bytes: int
    in_use: bool


def describe_cache(path: str | os.PathLike[str]) -> CacheFacts:
    """Count a cache's vectors and bytes.

    Raises:
        CacheError: There is no such file, it is no cache, is damaged, has a newer schema, or is locked.
    """
    path = existing_file(path)
    used, log = in_use(path), wal_bytes(path)
    with VectorCache(path) as cache:
        stats = cache.stats()
        return CacheFacts(
            rows=stats.rows,
            widths=cache.widths(),
            bytes=stats.bytes,
            free_bytes=cache.free_bytes(),
            wal_bytes=log,
            in_use=used,
        )


def repair_cache(path: str | os.PathLike[str], *, show_progress: bool = False) -> CacheRepair:
    """Replace a damaged cache by a new file with all its intact vectors and the times of their last uses.

    A file whose first page is gone (header and schema) is read with the first page of a new one. The damaged file is
    kept beside the new one as ``PATH.damaged-TIME``. No process may have the cache open, this one included.

    Args:
        path: The file.
        show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.

    Raises:
        CacheError: There is no such file, it is none of a cache, has a newer schema, is in use, or nothing can be read.
    """
    path = existing_file(path)
    if in_use(path):
        raise CacheError(f"{path} is open in another process; end it, then repair")
    try:
        with VectorCache(path) as cache:
            found = cache.check(show_progress=show_progress)
        if found.intact:
            return CacheRepair(rows=found.rows, lost=0, damaged_file=None)
    except CacheError as error:
        if not (is_damage(error) or _too_short(path)):
            raise
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.repair-") as folder:
        new = Path(folder, "new")
        rows, lost = _copy(_readable(path, Path(folder, "old")), new, show_progress=show_progress)
        if rows == 0:
            raise CacheError(f"{path}: no vector of a millpond cache can be read; delete it, or choose another path")
        return CacheRepair(rows=rows, lost=lost, damaged_file=_exchange(path, new))


def existing_file(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute one.

    Raises:
        CacheError: There is no such file.
    """
    try:
        absolute = Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~somebody
        raise CacheError(f"{os.fspath(path)!r} is no path here ({error}); write it out") from error
    if not absolute.exists():
        raise CacheError(f"{absolute}: there is no such file; name the file that --cache was given")
    if not absolute.is_file():
        raise CacheError(f"{absolute} is not a file; name the file that --cache was given")
    return absolute


def in_use(path: Path) -> bool:
    """Whether another process has the cache open; False where the system does not tell.

    This process must not have it open: closing a file drops all locks that a process has on it.

    Raises:
        CacheError: The file cannot be opened.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    start, length = _LOCK_BYTES
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except BlockingIOError:
        return True
    except OSError as error:
        raise CacheError(f"{path} cannot be opened; make it and its folder writable ({error})") from error
    return False


def wal_bytes(path: Path) -> int:
    """Size of the write-ahead log beside a cache; 0 if there is none."""
    try:
        return Path(f"{path}-wal").stat().st_size
    except OSError:
        return 0


def _too_short(path: Path) -> bool:
    return 0 < path.stat().st_size < 512


def _readable(path: Path, copy: Path) -> Path:
    """A copy of a damaged file with its log; if its first page is none of a cache, with the first page of a new one.

    The tables of every cache begin on the same pages, because they are made by the same statements.
    """
    shutil.copyfile(path, copy)
    if wal_bytes(path):
        shutil.copyfile(f"{path}-wal", f"{copy}-wal")
    if _is_cache(copy):
        return copy
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    empty = copy.with_name("empty")
    SqliteFile(empty, application_id=APPLICATION_ID, migrations=MIGRATIONS).close()
    page = bytearray(empty.read_bytes()[:4096])
    pages = copy.stat().st_size // 4096
    page[28:32] = pages.to_bytes(4, "big")
    page[92:96] = page[24:28]  # the number of pages is valid
    page[32:40] = bytes(8)  # no free pages: a list of them may be damaged too
    with copy.open("r+b") as file:
        file.write(page)
    if not pages or not _is_cache(copy):
        known = "is a database of another application" if begin == _MAGIC else "is no millpond cache"
        raise CacheError(f"{path} {known}, or nothing of it can be read; delete it, or choose another path")
    return copy


def _is_cache(path: Path) -> bool:
    """Whether the tables of a cache are found in a file, damaged as it may be."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            stored_id = connection.execute("PRAGMA application_id").fetchone()[0]
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    except (sqlite3.Error, UnicodeDecodeError):
        return False
    return stored_id == APPLICATION_ID and {"rows", "uses"} <= names


def _copy(old: Path, new: Path, *, show_progress: bool) -> tuple[int, int]:
    """Copy the intact rows; returns their number, and that of the others."""
    lost = 0
    target = SqliteFile(new, application_id=APPLICATION_ID, migrations=MIGRATIONS)
    with (
        closing(target),
        _source(old) as source,
        draw_bar(show=show_progress, unit=" vectors") as bar,
    ):
        for part in read_rows(source):
            intact = [row for row in part if row is not None and row.intact]
            lost += len(part) - len(intact)
            _insert(target, intact, read_ticks(source, intact))
            bar.update(len(part))
        with target.connection() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM uses").fetchone()
    return int(rows), lost


@contextmanager
def _source(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA trusted_schema=OFF")
        yield connection


def _insert(target: SqliteFile, rows: list[BlobRow], ticks: dict[int, int]) -> None:
    with target.transaction() as connection:
        connection.executemany(
            "INSERT OR REPLACE INTO rows (id, key, meta, checksum, value) VALUES (?, ?, ?, ?, ?)", rows
        )
        connection.executemany(
            "INSERT OR REPLACE INTO uses (id, tick) VALUES (?, ?)", ((row.id, ticks.get(row.id, 0)) for row in rows)
        )


def _exchange(path: Path, new: Path) -> Path:
    """Put the new file in the place of the damaged one, which gets another name; there is a file at every moment."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    kept, number = path.with_name(f"{path.name}.damaged-{stamp}"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    # The log first: the new file must not meet it.
    for end in ("-wal", "-shm"):
        if Path(f"{path}{end}").exists():
            Path(f"{path}{end}").rename(f"{kept}{end}")
    descriptor = os.open(new, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(path, kept)
    except OSError:  # no hard links on this disk
        path.rename(kept)
    new.replace(path)
    return kept
