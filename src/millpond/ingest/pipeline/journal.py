"""Journal: which records a collection holds, in a file by which a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

from millpond.cache.sqlitefile import WAY_OUT, SqliteFile
from millpond.errors import CacheError, JournalError
from millpond.ingest.record import Record

APPLICATION_ID = 0x4D504A4C  # "MPJL"
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE targets (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
        """CREATE TABLE records (target INTEGER NOT NULL, id TEXT NOT NULL, digest BLOB NOT NULL,
           chunks INTEGER NOT NULL, PRIMARY KEY (target, id)) WITHOUT ROWID""",
    ),
    (
        "ALTER TABLE targets ADD COLUMN run TEXT NOT NULL DEFAULT ''",
        # An entry of an earlier generation than its target's is not trusted.
        "ALTER TABLE targets ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE records ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
    ),
)
_IDS_PER_SELECT = 500
_PAGE = 2048
_EMPTY = blake2b(digest_size=16)
_INVALID = b""  # the digest of a record that is about to be written again


class JournalEntry(NamedTuple):
    """A record as a collection holds it."""

    id: str
    digest: bytes  # its `digest`; empty while it is being written again
    chunks: int  # how many rows it has
    trusted: bool = True  # whether its rows need not be compared with the record


def digest(record: Record, settings: str = "") -> bytes:
    """16 bytes of BLAKE2b over a record's text and metadata, and the settings by which it is cut into chunks."""
    hasher = _EMPTY.copy()  # less work than a new one
    hasher.update(f"{record.text}\0{settings}".encode())
    if record.metadata:
        hasher.update(json.dumps(record.metadata, ensure_ascii=False, sort_keys=True).encode())
    return hasher.digest()


class Journal:
    """Entries of the records that a database has acknowledged, for any number of collections.

    An entry is made after the acknowledgement, so a record with an entry was written; one without may have been. The
    file is an sqlite database, readable by its owner only (0600): it holds ids, and no texts. An entry survives a crash
    of the process; a power cut may lose the last ones. After a fork the child process opens the file again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        with self._errors():
            self._file = SqliteFile(self.path, application_id=APPLICATION_ID, migrations=MIGRATIONS)

    def collection(self, name: str) -> CollectionEntries:
        """The entries of a collection, by a name that says where it is and which model fills it."""
        with self._errors(), self._file.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO targets (name) VALUES (?)", (name,))
            found = connection.execute("SELECT number, run, generation FROM targets WHERE name = ?", (name,))
            number, run, generation = found.fetchone()
        return CollectionEntries(self, int(number), str(run), int(generation))

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read by; its errors are JournalErrors."""
        with self._errors(), self._file.connection() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection in a transaction, which is committed at the end; its errors are JournalErrors."""
        with self._errors(), self._file.transaction() as connection:
            yield connection

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except CacheError as error:
            reason = str(error).replace("is not a millpond cache", "is not a journal of millpond")
            reason = reason.replace(f"the cache {self.path}", str(self.path)).replace(" set max_bytes,", "")
            reason = reason.replace(f"cache={str(self.path)!r}", f"journal={str(self.path)!r}")
            raise JournalError(reason if reason.startswith("journal=") else f"the journal {reason}") from error
        except (sqlite3.Error, TypeError, ValueError) as error:  # a flipped bit makes a number of a text, or a None
            raise JournalError(f"the journal {self.path} is damaged; {WAY_OUT} ({error})") from error


def _entry(key: object, name: object, chunks: object, trusted: object = True) -> JournalEntry:
    """A row as an entry; raises TypeError for one that no version of the journal has written."""
    if not (isinstance(key, str) and isinstance(name, bytes) and isinstance(chunks, int)):
        raise TypeError(f"the entry {key!r} has values of other types")
    return JournalEntry(key, name, chunks, bool(trusted))


class CollectionEntries:
    """The entries of one collection. Any thread may use it.

    Attributes:
        run: The id of the run that changed the collection last, as far as the journal knows.
    """

    def __init__(self, journal: Journal, number: int, run: str, generation: int) -> None:
        self._journal = journal
        self._number = number
        self._generation = generation
        self.run = run

    def any(self) -> bool:
        """Whether there is an entry."""
        with self._journal.reading() as connection:
            query = "SELECT 1 FROM records WHERE target = ? LIMIT 1"
            return connection.execute(query, (self._number,)).fetchone() is not None

    def note_run(self, run: str) -> None:
        """Note the run that changes the collection."""
        with self._journal.writing() as connection:
            connection.execute("UPDATE targets SET run = ? WHERE number = ?", (run, self._number))
        self.run = run

    def distrust(self, run: str) -> None:
        """Note the run that changed the collection last, of which the entries know nothing."""
        with self._journal.writing() as connection:
            query = "UPDATE targets SET run = ?, generation = generation + 1 WHERE number = ? RETURNING generation"
            ((self._generation,),) = connection.execute(query, (run, self._number)).fetchall()
        self.run = run

    def find(self, ids: Sequence[str]) -> dict[str, JournalEntry]:
        """The entries of these records."""
        found: dict[str, JournalEntry] = {}
        with self._journal.reading() as connection:
            for start in range(0, len(ids), _IDS_PER_SELECT):
                part = ids[start : start + _IDS_PER_SELECT]
                places = ",".join("?" * len(part))
                query = f"SELECT id, digest, chunks, generation = ? FROM records WHERE target = ? AND id IN ({places})"
                for row in connection.execute(query, (self._generation, self._number, *part)):
                    found[row[0]] = _entry(*row)
        return found

    def of_file(self, path: str, mark: str) -> list[str]:
        """The ids of the records of a file, and of its parts, which ``mark`` parts from its path, that have rows."""
        if path != path.encode(errors="ignore").decode():  # no UTF-8, so no id
            return []
        query = "SELECT id FROM records WHERE target = ? AND chunks > 0 AND (id = ? OR (id > ? AND id < ?))"
        first, last = f"{path}{mark}", f"{path}{chr(ord(mark) + 1)}"
        with self._journal.reading() as connection:
            return [str(key) for (key,) in connection.execute(query, (self._number, path, first, last))]

    def add(self, entries: Iterable[JournalEntry]) -> None:
        """Note records that the database has acknowledged."""
        with self._journal.writing() as connection:
            connection.executemany(
                "INSERT INTO records (target, id, digest, chunks, generation) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (target, id) DO UPDATE SET "
                "digest = excluded.digest, chunks = excluded.chunks, generation = excluded.generation",
                [(self._number, each.id, each.digest, each.chunks, self._generation) for each in entries],
            )

    def invalidate(self, ids: Iterable[str]) -> None:
        """Note that records are about to be written again; how many rows they had stays known."""
        with self._journal.writing() as connection:
            connection.executemany(
                "UPDATE records SET digest = ? WHERE target = ? AND id = ?",
                [(_INVALID, self._number, each) for each in ids],
            )

    def remove(self, ids: Iterable[str]) -> None:
        """Remove the entries of records that the collection holds no more, and of their pieces that were records."""
        with self._journal.writing() as connection:
            # The name of a piece is the id, NUL and its number.
            connection.executemany(
                "DELETE FROM records WHERE target = ? AND id >= ? AND id < ?",
                [(self._number, each, f"{each}\1") for each in ids],
            )

    def rows(self) -> int:
        """How many rows these records have."""
        with self._journal.reading() as connection:
            query = "SELECT COALESCE(SUM(chunks), 0) FROM records WHERE target = ? AND digest != ?"
            return int(connection.execute(query, (self._number, _INVALID)).fetchone()[0])

    def ends(self, count: int) -> list[JournalEntry]:
        """The first and the last entries in the order of their ids, ``count`` of each."""
        found: dict[str, JournalEntry] = {}
        with self._journal.reading() as connection:
            for order in ("ASC", "DESC"):
                query = (
                    "SELECT id, digest, chunks FROM records WHERE target = ? AND digest != ? AND chunks > 0 "
                    f"ORDER BY id {order} LIMIT ?"
                )
                for row in connection.execute(query, (self._number, _INVALID, count)):
                    found[row[0]] = _entry(*row)
        return list(found.values())

    def some(self, count: int) -> list[JournalEntry]:
        """About so many entries at random, with rows."""
        with self._journal.reading() as connection:
            total = "SELECT COUNT(*) FROM records WHERE target = ?"
            step = max(1, connection.execute(total, (self._number,)).fetchone()[0] // count)
            query = (
                "SELECT id, digest, chunks FROM records WHERE target = ? AND digest != ? AND chunks > 0 "
                "AND abs(random()) % ? = 0"
            )
            return [_entry(*row) for row in connection.execute(query, (self._number, _INVALID, step))]

    def pages(self) -> Iterator[list[JournalEntry]]:
        """All entries in the order of their ids, page by page; between two pages some may be removed."""
        last = ""
        query = "SELECT id, digest, chunks FROM records WHERE target = ? AND id > ? AND digest != ? ORDER BY id LIMIT ?"
        while True:
            with self._journal.reading() as connection:
                page = [_entry(*row) for row in connection.execute(query, (self._number, last, _INVALID, _PAGE))]
            if not page:
                return
            yield page
            last = page[-1].id
