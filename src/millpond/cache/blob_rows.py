"""Blob rows: every row of a BlobStore's file that can be read, with a damaged file's pages skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

_ROWS_PER_SELECT = 1024
_SMALLEST_ROW = 64  # bytes; no row takes less, so no id of a file is far above its size over this
_COLUMNS = "id, key, meta, checksum, value"


class BlobRow(NamedTuple):
    """One row as it is stored."""

    id: int
    key: bytes
    meta: int
    checksum: int
    value: bytes

    @property
    def intact(self) -> bool:
        """Whether it matches its checksum."""
        try:
            return 0 <= self.meta < 1 << 32 and checksum(self.key, self.meta, self.value) == self.checksum
        except TypeError:  # damage can change a column's type
            return False


def checksum(key: bytes, meta: int, value: bytes | memoryview) -> int:
    """CRC-32 over the whole row, the key included: an index entry that points to another key's row must be noticed.

    ``meta`` (0 to 2**32 - 1) is the initial value: for the same bytes, another initial value gives another checksum.
    """
    return crc32(value, crc32(key, meta))


def read_rows(connection: sqlite3.Connection) -> Iterator[list[BlobRow | None]]:
    """All rows in the order of their ids, some at a time; None for one that must exist and cannot be read.

    A query that meets a broken page fails as a whole, so its range of ids is halved until the page is alone.
    """
    first, last = _bounds(connection)
    ranges = [(first, last)]
    while ranges:
        low, high = ranges.pop()
        query = f"SELECT {_COLUMNS} FROM rows WHERE id BETWEEN ? AND ? ORDER BY id LIMIT {_ROWS_PER_SELECT}"
        try:
            rows = [BlobRow(*row) for row in connection.execute(query, (low, high))]
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            if low == high:
                row = _row(connection, low)
                if row is not None or _expected(connection, low):
                    yield [row]
                continue
            middle = (low + high) // 2
            ranges += [(middle + 1, high), (low, middle)]
            continue
        if rows:
            yield list(rows)
        if len(rows) == _ROWS_PER_SELECT and rows[-1].id < high:
            ranges.append((rows[-1].id + 1, high))


def read_ticks(connection: sqlite3.Connection, rows: list[BlobRow]) -> dict[int, int]:
    """When rows were last used, by their ids; without those that cannot be read."""
    query = "SELECT id, tick FROM uses WHERE id BETWEEN ? AND ?"
    try:
        ticks = dict(connection.execute(query, (rows[0].id, rows[-1].id)).fetchall()) if rows else {}
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return {}
    return {i: tick for i, tick in ticks.items() if isinstance(tick, int)}


def _bounds(connection: sqlite3.Connection) -> tuple[int, int]:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    known: list[int] = []
    for query in ("SELECT max(id) FROM rows", "SELECT max(id) FROM uses"):
        try:
            (last,) = connection.execute(query).fetchone()
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            continue
        if isinstance(last, int):
            known.append(last)
    # Of a table whose last page is broken no maximum is known.
    return 1, max([0, *known]) if len(known) == 2 else max([pages * size // _SMALLEST_ROW, *known])


def _row(connection: sqlite3.Connection, row_id: int) -> BlobRow | None:
    """One row by its id; unlike a range, it does not look at the next row, whose page may be the broken one."""
    try:
        row = connection.execute(f"SELECT {_COLUMNS} FROM rows WHERE id = ?", (row_id,)).fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return None
    return None if row is None else BlobRow(*row)


def _expected(connection: sqlite3.Connection, row_id: int) -> bool:
    """Whether there should be a row: each has its last use in another table."""
    try:
        return connection.execute("SELECT 1 FROM uses WHERE id = ?", (row_id,)).fetchone() is not None
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return False
