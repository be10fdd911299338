"""RowFile: checksummed bytes by key in one sqlite file; where it is bounded, the least recently used make room."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from millpond.errors import CacheError
from millpond.sqlitefile import WAY_OUT, SqliteFile

APPLICATION_ID = 0x4D504E44  # "MPND"
KEYS_PER_SELECT = 128  # a few hundred KB of rows: still in the processor's cache when they are copied out
SMALLEST_LIMIT = 1 << 15  # bytes; an empty file has 5 pages of 4 KiB

# Script i leads from schema version i to i + 1; version 0 is an empty file. A released script is never edited.
# `uses` is apart from `rows`, so that noting a use rewrites a page of small numbers and not one of values.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE rows (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE,
           meta INTEGER NOT NULL, checksum INTEGER NOT NULL, value BLOB NOT NULL)""",
        "CREATE TABLE uses (id INTEGER PRIMARY KEY, tick INTEGER NOT NULL)",
        "CREATE INDEX uses_by_tick ON uses (tick)",
    ),
)

_USES_HELD = 1 << 15  # uses kept in memory before they are written


class Rows(NamedTuple):
    """Rows found, as columns: a hundred thousand rows a second leave no time for an object each."""

    keys: tuple[bytes, ...]
    metas: tuple[int, ...]  # the writer's own numbers, 0 to 2**32 - 1
    values: tuple[bytes, ...]


def checksum(key: bytes, meta: int, value: bytes | memoryview) -> int:
    """CRC-32 over all of a row, the key too: an index entry that leads to another key's row must not pass.

    ``meta`` (0 to 2**32 - 1) is the starting value: for given bytes, another start is another checksum.
    """
    return crc32(value, crc32(key, meta))


class RowFile:
    """Bytes by key, for threads and processes to share; raises what :class:`SqliteFile` raises.

    Attributes:
        path: The file.
        evicted: Rows that this object removed, or did not keep, for its limit.
    """

    def __init__(self, path: Path, *, max_bytes: int | None) -> None:
        self.path = path
        self.evicted = 0
        self._max_bytes = max_bytes
        self._file = SqliteFile(path, application_id=APPLICATION_ID, migrations=MIGRATIONS)
        self._using = threading.Lock()
        self._used: set[int] = set()  # ids

    def read(self, keys: Sequence[bytes]) -> Rows:
        """The rows of ``keys`` (distinct ones), checked, in any order; absent keys have none."""
        with self._file.connection() as connection:
            found = _select(connection, "key, id, meta, checksum, value", keys)
        if not found:
            return Rows((), (), ())
        names, ids, metas, checksums, values = zip(*found, strict=True)
        try:
            sound = 0 <= min(metas) <= max(metas) < 1 << 32
            sound = sound and tuple(map(checksum, names, metas, values)) == checksums
        except TypeError:  # damage can change a column's type
            sound = False
        if not sound:
            raise CacheError(f"{self.path} is damaged: a row does not match its checksum; {WAY_OUT}")
        if self._max_bytes is not None:
            with self._using:
                self._used.update(ids)
            if len(self._used) >= _USES_HELD:
                self._note_uses()
        return Rows(names, metas, values)

    def write(self, values: Mapping[bytes, tuple[int, bytes | memoryview]]) -> None:
        """Store ``{key: (meta, value)}``, replacing what a key had: one transaction, committed on return.

        Of more values than fit into the limit the last are kept.
        """
        keys, limit = list(values), self._max_bytes
        free: list[int] = []
        with self._file.transaction() as connection:
            tick = self._write_uses(connection) + 1
            known: dict[bytes, int] = dict(_select(connection, "key, id", keys))
            evicted = 0
            if limit is not None:
                surplus, keys = _split([len(value) for _, value in values.values()], keys, limit)
                _delete(connection, [known[key] for key in surplus if key in known])
                _set_tick(connection, known.values(), tick)  # lest they make room for the others
                need = sum(_footprint(len(values[key][1])) for key in keys if key not in known)
                free = _evict(connection, need + _bytes_in_use(connection) - limit, before=tick)
                evicted = len(surplus) + len(free)
            # New rows take the ids of evicted ones first, and with them their place in the file: holes would
            # otherwise stay until all the neighbours are gone too.
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM rows").fetchone()
            last = max([last, *free])
            fresh = chain(sorted(free), range(last + 1, last + 1 + len(keys)))
            ids = [known[key] if key in known else next(fresh) for key in keys]
            connection.executemany(
                "INSERT OR REPLACE INTO rows (key, id, meta, checksum, value) VALUES (?, ?, ?, ?, ?)",
                (
                    (key, i, values[key][0], checksum(key, *values[key]), values[key][1])
                    for key, i in zip(keys, ids, strict=True)
                ),
            )
            connection.executemany("INSERT OR REPLACE INTO uses (id, tick) VALUES (?, ?)", ((i, tick) for i in ids))
            while limit is not None and _bytes_in_use(connection) > limit:
                gone = _evict(connection, limit // 64, before=tick + 1)
                evicted += len(gone)
                if not gone:
                    break
        with self._using:
            self.evicted += evicted

    def count(self) -> int:
        """Rows in the file; reads about 10 bytes of each."""
        with self._file.connection() as connection:
            return int(connection.execute("SELECT count(*) FROM uses").fetchone()[0])

    def bytes_in_use(self) -> int:
        """Bytes of the file that hold something."""
        with self._file.connection() as connection:
            return _bytes_in_use(connection)

    def clear(self) -> None:
        """Remove every row and give the space back to the disk."""
        with self._file.transaction() as connection:
            connection.execute("DELETE FROM rows")
            connection.execute("DELETE FROM uses")
            with self._using:
                self._used.clear()
        with self._file.connection() as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Write the uses held in memory and close the file; later calls raise, but for another ``close``."""
        if self._file.open:
            self._note_uses()
            self._file.close()

    def _write_uses(self, connection: sqlite3.Connection) -> int:
        """Write the uses held in memory under a new tick, and return it. Ticks order uses across processes."""
        with self._using:
            used, self._used = self._used, set()
        (tick,) = connection.execute("SELECT coalesce(max(tick), 0) + 1 FROM uses").fetchone()
        _set_tick(connection, sorted(used), tick)
        return int(tick)

    def _note_uses(self) -> None:
        """Write the uses now, unless somebody is writing: a reader neither waits nor fails for them."""
        if self._used:
            with suppress(CacheError), self._file.transaction(wait=False) as connection:
                self._write_uses(connection)


def _select(connection: sqlite3.Connection, columns: str, keys: Sequence[bytes]) -> list[Any]:
    rows: list[Any] = []
    for start in range(0, len(keys), KEYS_PER_SELECT):
        some = list(keys[start : start + KEYS_PER_SELECT])
        some += some[-1:] * ((1 << (len(some) - 1).bit_length()) - len(some))  # few shapes, few statements to prepare
        rows += connection.execute(f"SELECT {columns} FROM rows WHERE key IN ({', '.join('?' * len(some))})", some)
    return rows


def _set_tick(connection: sqlite3.Connection, ids: Iterable[int], tick: int) -> None:
    connection.executemany("UPDATE uses SET tick = ? WHERE id = ?", ((tick, i) for i in ids))


def _bytes_in_use(connection: sqlite3.Connection) -> int:
    ((pages,), (free,), (size,)) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _footprint(length: int) -> int:
    """Bytes of the file that a value of ``length`` takes at most; at worst half of a page stays empty."""
    return length * 2 + 256


def _split(lengths: Sequence[int], keys: list[bytes], limit: int) -> tuple[list[bytes], list[bytes]]:
    """The keys of values that would overfill the limit by themselves, and the last ones, which fit."""
    total = SMALLEST_LIMIT // 2  # the tables' own pages
    for index in range(len(keys) - 1, -1, -1):
        total += _footprint(lengths[index])
        if total > limit:
            return keys[: index + 1], keys[index + 1 :]
    return [], keys


def _delete(connection: sqlite3.Connection, ids: Sequence[int]) -> None:
    for table in ("rows", "uses"):
        connection.executemany(f"DELETE FROM {table} WHERE id = ?", ((i,) for i in ids))


def _evict(connection: sqlite3.Connection, need: int, *, before: int) -> list[int]:
    """Remove the least recently used rows of ticks under ``before`` until ``need`` bytes are free; their ids."""
    gone: list[int] = []
    while need > 0:
        oldest = connection.execute(
            "SELECT id, length(value) FROM uses JOIN rows USING (id) WHERE tick < ? ORDER BY tick, id LIMIT 256",
            (before,),
        ).fetchall()
        if not oldest:
            break
        batch: list[int] = []
        for i, length in oldest:
            if need <= 0:
                break
            batch.append(i)
            need -= _footprint(length)
        _delete(connection, batch)
        gone += batch
    return gone
