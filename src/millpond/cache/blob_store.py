"""BlobStore: checksummed bytes by key in one sqlite file; with a size limit, the least recently used are evicted."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any
from zlib import crc32

from millpond.cache.recent_rows import RecentRows
from millpond.cache.sqlitefile import SqliteFile, is_damage, pragma
from millpond.errors import CacheError, InvalidRequestError

APPLICATION_ID = 0x4D504E44  # "MPND"
KEYS_PER_SELECT = 128  # a few hundred KB of rows, which are still in the processor's cache when they are copied
SMALLEST_LIMIT = 1 << 15  # bytes; an empty file has 5 pages of 4 KiB

# Script i migrates from schema version i to i + 1; version 0 is an empty file. A released script is never edited.
# `uses` is a separate table, so that recording a use rewrites a page of small numbers, not one of values.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE rows (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE,
           meta INTEGER NOT NULL, checksum INTEGER NOT NULL, value BLOB NOT NULL)""",
        "CREATE TABLE uses (id INTEGER PRIMARY KEY, tick INTEGER NOT NULL)",
        "CREATE INDEX uses_by_tick ON uses (tick)",
    ),
)

_TABLES = ("rows", "uses")
_SELECT_ROWS = "SELECT key, id, meta, checksum, value FROM rows WHERE id"
_ROWS_PER_CHECK = 1024
# Rows of reads of at most so many keys are held in memory, up to so many bytes: 8,600 vectors of 384 floats.
_FEW, _RECENT_BYTES = 16, 16 << 20
_MAX_PENDING_USES = 1 << 15  # uses held in memory before they are written


class BlobStore:
    """Bytes by key, shared by threads and processes; raises what :class:`SqliteFile` raises.

    ``evicted`` counts the rows that this object removed, or did not store, because of its limit for the bytes in use.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None) -> None:
        check_limit(max_bytes, SMALLEST_LIMIT)
        try:
            self.path = Path(path).expanduser().absolute()
        except RuntimeError as error:  # the home of a user that does not exist
            raise CacheError(f"{os.fspath(path)!r} is not a path here ({error}); write it out") from error
        self.evicted = 0
        self._max_bytes = max_bytes
        self._file = SqliteFile(self.path, application_id=APPLICATION_ID, migrations=MIGRATIONS)
        self._uses_lock = threading.Lock()
        self._pending_uses: set[int] = set()  # ids
        self._recent = RecentRows(_RECENT_BYTES)

    @property
    def memory(self) -> int:
        """Bytes of rows that are held in memory, too."""
        return self._recent.size()[1]

    def read(self, keys: Sequence[bytes]) -> tuple[list[tuple[Any, ...]], int]:
        """The rows (key, id, meta, checksum, value) of ``keys`` (distinct), in any order, and how many are damaged.

        Damaged ones are left out. If a page of the file cannot be read, all are, and every key counts as damaged.
        What was asked for a few keys at a time, as questions are, is held in memory.
        """
        few, changes = len(keys) <= _FEW, self._recent.changes
        intact = self._recent.find(keys) if few else []
        if intact:
            held = {row[0] for row in intact}
            keys = [key for key in keys if key not in held]
        damaged = 0
        if keys:
            found, damaged = self._read_file(keys)
            if few and found:
                self._recent.keep(found, changes=changes)
            intact += found
        if self._max_bytes is not None:
            with self._uses_lock:
                self._pending_uses.update(row[1] for row in intact)
            if len(self._pending_uses) >= _MAX_PENDING_USES:
                self._flush_uses()
        return intact, damaged

    def _read_file(self, keys: Sequence[bytes]) -> tuple[list[tuple[Any, ...]], int]:
        try:
            with self._file.connection() as connection:
                rows = _select(connection, "key, id, meta, checksum, value", keys)
        except CacheError as error:
            if not is_damage(error):
                raise
            return [], len(keys)
        intact = rows if _all_intact(rows) else [row for row in rows if _all_intact([row])]
        return intact, len(rows) - len(intact)

    def write(self, values: Mapping[bytes, tuple[int, bytes | memoryview]]) -> None:
        """Store ``{key: (meta, value)}`` in one transaction, committed on return; existing keys are replaced.

        If the values exceed the limit by themselves, the last ones are kept.
        """
        keys, limit = list(values), self._max_bytes
        free: list[int] = []
        with self._file.transaction() as connection:
            tick = self._write_uses(connection) + 1
            existing: dict[bytes, int] = dict(_select(connection, "key, id", keys))
            evicted = 0
            if limit is not None:
                surplus, keys = _split([len(value) for _, value in values.values()], keys, limit)
                _delete(connection, [existing[key] for key in surplus if key in existing])
                _set_tick(connection, existing.values(), tick)  # so that they are not evicted for the new ones
                need = sum(_footprint(len(values[key][1])) for key in keys if key not in existing)
                free = _evict(connection, need + _bytes_in_use(connection) - limit, before=tick)
                evicted = len(surplus) + len(free)
            # New rows reuse the ids of evicted rows first, and so their pages in the file: a page with some rows
            # evicted is not free for others until all its rows are.
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM rows").fetchone()
            last = max([last, *free])
            new_ids = chain(sorted(free), range(last + 1, last + 1 + len(keys)))
            ids = [existing[key] if key in existing else next(new_ids) for key in keys]
            connection.executemany(
                "INSERT OR REPLACE INTO rows (key, id, meta, checksum, value) VALUES (?, ?, ?, ?, ?)",
                (
                    (key, i, values[key][0], checksum(key, *values[key]), values[key][1])
                    for key, i in zip(keys, ids, strict=True)
                ),
            )
            connection.executemany("INSERT OR REPLACE INTO uses (id, tick) VALUES (?, ?)", ((i, tick) for i in ids))
            while limit is not None and _bytes_in_use(connection) > limit:
                removed = _evict(connection, limit // 64, before=tick + 1)
                evicted += len(removed)
                if not removed:
                    break
        self._recent.drop(values)
        with self._uses_lock:
            self.evicted += evicted

    def size(self) -> tuple[int, int, int]:
        """Rows, and bytes of the file's pages that are in use and that are not; reads about 10 bytes of each row."""
        with self._file.connection() as connection:
            (rows,) = connection.execute("SELECT count(*) FROM uses").fetchone()
            free = pragma(connection, "freelist_count") * pragma(connection, "page_size")
            return int(rows), _bytes_in_use(connection), free

    def problems(self) -> list[str]:
        """What sqlite finds wrong with the file's structure, at most 20 lines; reads all of it."""
        with self._file.connection() as connection:
            found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    def verify(self) -> Iterator[tuple[int, int]]:
        """Compare every row with its checksum; yields the numbers of intact and damaged ones, some rows at a time.

        A query that meets a broken page fails as a whole: the rows of its range are then read one by one.
        """
        with self._file.connection() as connection:
            ends = (f"SELECT coalesce(max(id), 0) FROM {table}" for table in _TABLES)
            last = max(connection.execute(query).fetchone()[0] for query in ends)
            for first in range(1, last + 1, _ROWS_PER_CHECK):
                ids = range(first, first + _ROWS_PER_CHECK)
                try:
                    rows = connection.execute(f"{_SELECT_ROWS} BETWEEN ? AND ?", (ids[0], ids[-1])).fetchall()
                    intact = [_all_intact([row]) for row in rows]
                except (sqlite3.DatabaseError, UnicodeDecodeError):
                    intact = [kept for i in ids if (kept := _verify_row(connection, i)) is not None]
                yield sum(intact), len(intact) - sum(intact)

    def lengths(self) -> dict[int, int]:
        """Number of rows for each length of a value; reads a page of every row."""
        query = "SELECT length(value), count(*) FROM rows GROUP BY 1 ORDER BY 1"
        with self._file.connection() as connection:
            return dict(connection.execute(query).fetchall())

    def clear(self) -> None:
        """Remove every row and give the space back to the disk."""
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM rows")
            connection.execute("DELETE FROM uses")
            with self._uses_lock:
                self._pending_uses.clear()
        self._recent.clear()
        with self._file.connection() as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Write the uses held in memory and close the file. Later calls raise, except ``close``."""
        self._flush_uses()
        self._file.close()
        self._recent.clear()

    def _write_uses(self, connection: sqlite3.Connection) -> int:
        """Write the uses held in memory with a new tick, and return it. Ticks order uses across processes."""
        with self._uses_lock:
            used, self._pending_uses = self._pending_uses, set()
        (tick,) = connection.execute("SELECT coalesce(max(tick), 0) + 1 FROM uses").fetchone()
        _set_tick(connection, sorted(used), tick)
        return int(tick)

    def _flush_uses(self) -> None:
        """Write the uses held in memory, unless another write is running: a reader neither waits nor fails for them."""
        if self._pending_uses:
            with suppress(CacheError), self._file.transaction(wait=False) as connection:
                self._write_uses(connection)


def check_limit(max_bytes: int | None, least: int) -> None:
    """Raise InvalidRequestError for a limit that is too small."""
    if max_bytes is not None and max_bytes < least:
        raise InvalidRequestError(
            f"max_bytes={max_bytes} is less than a cache can keep to ({least}); give it more, or None"
        )


def checksum(key: bytes, meta: int, value: bytes | memoryview) -> int:
    """CRC-32 over the whole row, the key included: an index entry that points to another key's row must be noticed.

    ``meta`` (0 to 2**32 - 1) is the initial value: for the same bytes, another initial value gives another checksum.
    """
    return crc32(value, crc32(key, meta))


def _verify_row(connection: sqlite3.Connection, row_id: int) -> bool | None:
    """Whether a row is intact; None if there should be none."""
    try:
        row = connection.execute(f"{_SELECT_ROWS} = ?", (row_id,)).fetchone()
        if row is not None:
            return _all_intact([row])
        return False if connection.execute("SELECT 1 FROM uses WHERE id = ?", (row_id,)).fetchone() else None
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return False


def _all_intact(rows: Sequence[tuple[Any, ...]]) -> bool:
    """Whether every row (key, id, meta, checksum, value) matches its checksum."""
    try:
        return all(0 <= meta < 1 << 32 and checksum(key, meta, value) == stored for key, _, meta, stored, value in rows)
    except TypeError:  # damage can change a column's type
        return False


def _select(connection: sqlite3.Connection, columns: str, keys: Sequence[bytes]) -> list[Any]:
    rows: list[Any] = []
    for start in range(0, len(keys), KEYS_PER_SELECT):
        part = list(keys[start : start + KEYS_PER_SELECT])
        part += part[-1:] * ((1 << (len(part) - 1).bit_length()) - len(part))  # powers of two: few prepared statements
        rows += connection.execute(f"SELECT {columns} FROM rows WHERE key IN ({', '.join('?' * len(part))})", part)
    return rows


def _set_tick(connection: sqlite3.Connection, ids: Iterable[int], tick: int) -> None:
    connection.executemany("UPDATE uses SET tick = ? WHERE id = ?", ((tick, i) for i in ids))


def _bytes_in_use(connection: sqlite3.Connection) -> int:
    pages = pragma(connection, "page_count") - pragma(connection, "freelist_count")
    return pages * pragma(connection, "page_size")


def _footprint(length: int) -> int:
    """Upper bound of the file's bytes for a value of ``length``; at worst half of a page stays empty."""
    return length * 2 + 256


def _split(lengths: Sequence[int], keys: list[bytes], limit: int) -> tuple[list[bytes], list[bytes]]:
    """The keys in two parts: those whose values do not fit into the limit, and the last ones, which do."""
    own = SMALLEST_LIMIT // 2  # the tables' own pages
    totals = accumulate(map(_footprint, reversed(lengths)), initial=own)
    first = len(keys) + 1 - sum(total <= limit for total in totals)
    return keys[:first], keys[first:]


def _delete(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    for table in _TABLES:
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", ((i,) for i in ids))


def _evict(connection: sqlite3.Connection, need: int, *, before: int) -> list[int]:
    """Remove the least recently used rows with ticks below ``before`` until ``need`` bytes are free; return the ids."""
    ids: list[int] = []
    query = "SELECT id, length(value) FROM uses JOIN rows USING (id) WHERE tick < ? ORDER BY tick, id"
    for i, length in connection.execute(query, (before,)) if need > 0 else ():
        ids.append(i)
        need -= _footprint(length)
        if need <= 0:
            break
    _delete(connection, ids)
    return ids
