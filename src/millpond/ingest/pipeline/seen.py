"""SeenRecords: the ids of a source, on disk, to find the rows of records that it no longer has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from millpond.errors import SinkError

_IDS_PER_SELECT = 500
_PAGE = 1024


class SeenRecords:
    """A set of ids, and the rows of others, in a temporary file that sqlite deletes.

    For one thread.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # a private file, deleted when it is closed
        self._database.execute("CREATE TABLE seen (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("CREATE TABLE stale (row INTEGER PRIMARY KEY, row_id TEXT NOT NULL, id TEXT NOT NULL)")
        self._database.execute("PRAGMA journal_mode=OFF")

    def add(self, ids: Iterable[str]) -> None:
        """Add ids; those that are there count once."""
        try:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO seen VALUES (?)", ((each,) for each in ids))
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise SinkError(
                f"the ids of the source cannot be kept in a temporary file ({error}); free some space, or set "
                "SQLITE_TMPDIR to another folder"
            ) from error

    def __len__(self) -> int:
        return int(self._database.execute("SELECT COUNT(*) FROM seen").fetchone()[0])

    def forget_stale(self) -> None:
        """Drop what :meth:`note_stale` kept."""
        self._database.execute("DELETE FROM stale")

    def note_stale(self, rows: Sequence[tuple[str, str]]) -> None:
        """Keep those of these rows (row id, record id) whose record was not seen, but not a framework's own rows."""
        own = [(row_id, record_id) for row_id, record_id in rows if row_id != record_id]
        known: set[str] = set()
        for start in range(0, len(own), _IDS_PER_SELECT):
            part = [record_id for _, record_id in own[start : start + _IDS_PER_SELECT]]
            query = f"SELECT id FROM seen WHERE id IN ({','.join('?' * len(part))})"
            known.update(each for (each,) in self._database.execute(query, part))
        self._database.executemany(
            "INSERT INTO stale (row_id, id) VALUES (?, ?)", (row for row in own if row[1] not in known)
        )

    def stale(self) -> Iterator[list[tuple[str, str]]]:
        """Pages of the rows kept by :meth:`note_stale`."""
        last = 0
        while page := self._database.execute(
            "SELECT row, row_id, id FROM stale WHERE row > ? ORDER BY row LIMIT ?", (last, _PAGE)
        ).fetchall():
            yield [(row_id, record_id) for _, row_id, record_id in page]
            last = page[-1][0]
