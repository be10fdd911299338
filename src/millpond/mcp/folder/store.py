"""UnitStore: the units of a folder in a SQLite file, with their vectors and words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from millpond.cache.sqlitefile import SqliteFile
from millpond.ingest.units.unit import Unit
from millpond.mcp.folder.walk import Content, Stamp
from millpond.mcp.folder.words import words

FloatArray = npt.NDArray[np.float32]

_APPLICATION_ID = 0x4D504D43  # "MPMC"
# Script i migrates from schema version i to i + 1. Ids are never used twice, so that a reader knows what is new.
_MIGRATIONS = (
    (
        "CREATE TABLE state (token TEXT NOT NULL, changes INTEGER NOT NULL)",
        "INSERT INTO state VALUES (hex(randomblob(8)), 0)",
        """CREATE TABLE files (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, read INTEGER NOT NULL, digest BLOB NOT NULL,
           skipped TEXT) WITHOUT ROWID""",
        """CREATE TABLE units (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, kind TEXT NOT NULL,
           name TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, part INTEGER NOT NULL,
           text TEXT NOT NULL, digest BLOB NOT NULL, vector BLOB NOT NULL)""",
        "CREATE INDEX units_by_path ON units (path)",
        "CREATE INDEX units_by_digest ON units (digest)",
        "CREATE VIRTUAL TABLE words USING fts5 (title, body, tokenize='porter unicode61')",
    ),
)
_UNIT = "id, path, kind, name, first, last, part, text"
_KEYS = 500  # of one statement
# What a word counts in the path and the name, and in the text.
_TITLE, _BODY = 2.0, 1.0


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file that was read."""

    stamp: str
    read: int  # nanoseconds of the clock
    digest: bytes
    skipped: str | None

    def is_proven_by(self, stamp: Stamp) -> bool:
        """Whether a file of this stamp need not be read again."""
        return stamp.proves(self.stamp, self.read)


@dataclass(frozen=True)
class StoredUnit:
    """A unit as it is stored."""

    row: int
    path: str
    kind: str
    name: str
    first: int
    last: int
    part: int
    text: str

    @property
    def id(self) -> str:
        """What names the unit for an agent: path and lines."""
        part = f"#{self.part}" if self.part else ""
        return f"{self.path}:{self.first}-{self.last}{part}"


@dataclass(frozen=True)
class NewUnit:
    """A unit to store."""

    unit: Unit
    digest: bytes  # of the text that was embedded
    vector: FloatArray


class UnitStore:
    """The file; threads and processes may share it. A change of a source file is one transaction."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = SqliteFile(path, application_id=_APPLICATION_ID, migrations=_MIGRATIONS)

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._file.path

    def vectors(self, digests: Sequence[bytes]) -> dict[bytes, FloatArray]:
        """The vectors of texts that are stored, in whatever file."""
        found: dict[bytes, FloatArray] = {}
        with self._file.connection() as connection:
            for start in range(0, len(digests), _KEYS):
                part = digests[start : start + _KEYS]
                marks = ",".join("?" * len(part))
                query = f"SELECT digest, vector FROM units WHERE digest IN ({marks})"
                found.update((digest, decode(vector)) for digest, vector in connection.execute(query, part))
        return found

    def write(self, files: Mapping[str, tuple[Content, Sequence[NewUnit]]]) -> None:
        """Replace all that is stored of these files, in one transaction."""
        with self._change() as connection:
            for path, (content, units) in files.items():
                _remove(connection, path)
                row = (path, content.stamp.text, content.read, content.digest, content.skipped)
                connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", row)
                for new in units:
                    _insert(connection, path, new)

    def touch(self, files: Mapping[str, Content]) -> None:
        """Note that these files were read again and are the same."""
        with self._change() as connection:
            connection.executemany(
                "UPDATE files SET stamp = ?, read = ? WHERE path = ?",
                [(content.stamp.text, content.read, path) for path, content in files.items()],
            )

    def forget(self, paths: Iterable[str]) -> None:
        """Remove files that are gone."""
        with self._change() as connection:
            for path in paths:
                _remove(connection, path)

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """What is stored at one moment."""
        with self._file.connection() as connection:
            connection.execute("BEGIN")
            try:
                yield Snapshot(connection)
            finally:
                connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._file.transaction() as connection:
            yield connection
            connection.execute("UPDATE state SET changes = changes + 1")


class Snapshot:
    """A read transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def state(self) -> tuple[str, int]:
        """The file's own token, and how often it was changed."""
        token, changes = self._connection.execute("SELECT token, changes FROM state").fetchone()
        return str(token), int(changes)

    def sizes(self) -> tuple[int, int]:
        """Files and units."""
        files, units = self._connection.execute(
            "SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM units)"
        ).fetchone()
        return int(files), int(units)

    def files(self) -> dict[str, StoredFile]:
        """All files that were read."""
        rows = self._connection.execute("SELECT path, stamp, read, digest, skipped FROM files")
        return {path: StoredFile(*rest) for path, *rest in rows}

    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of all units, ascending."""
        return np.fromiter((row for (row,) in self._connection.execute("SELECT id FROM units ORDER BY id")), np.int64)

    def vectors_after(self, row: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Rows, and vectors ``[n, d]``, of the units after a row."""
        found = self._connection.execute("SELECT id, vector FROM units WHERE id > ? ORDER BY id", (row,)).fetchall()
        if not found:
            return np.zeros(0, np.int64), np.zeros((0, 0), np.float32)
        matrix = decode(b"".join(vector for _, vector in found)).reshape(len(found), -1)
        return np.array([row for row, _ in found], np.int64), matrix

    def units(self, rows: Sequence[int]) -> dict[int, StoredUnit]:
        """Units by their rows."""
        found: dict[int, StoredUnit] = {}
        for start in range(0, len(rows), _KEYS):
            part = rows[start : start + _KEYS]
            marks = ",".join("?" * len(part))
            for row in self._connection.execute(f"SELECT {_UNIT} FROM units WHERE id IN ({marks})", part):
                found[row[0]] = StoredUnit(*row)
        return found

    def all_units(self) -> Iterator[StoredUnit]:
        """Every unit, without its text."""
        query = f"SELECT {_UNIT.removesuffix('text')} '' FROM units ORDER BY id"
        return (StoredUnit(*row) for row in self._connection.execute(query))

    def unit(self, path: str, first: int, last: int, part: int) -> StoredUnit | None:
        """A unit by what its id says."""
        query = f"SELECT {_UNIT} FROM units WHERE path = ? AND first = ? AND last = ? AND part = ?"
        row = self._connection.execute(query, (path, first, last, part)).fetchone()
        return None if row is None else StoredUnit(*row)

    def ranked_by_words(self, expression: str, most: int) -> list[tuple[int, float]]:
        """Rows and BM25 of the units that have one of the words, best first."""
        query = f"""SELECT rowid, -bm25(words, {_TITLE}, {_BODY}) AS score FROM words WHERE words MATCH ?
            ORDER BY score DESC, rowid LIMIT ?"""
        return [(int(row), float(score)) for row, score in self._connection.execute(query, (expression, most))]


def encode(vector: FloatArray) -> bytes:
    """A vector as it is stored: float16, whose error is a tenth of the differences between texts of one meaning."""
    return vector.astype("<f2").tobytes()


def decode(data: bytes) -> FloatArray:
    """Vectors as they are compared."""
    return np.frombuffer(data, "<f2").astype(np.float32)


def _remove(connection: sqlite3.Connection, path: str) -> None:
    connection.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM units WHERE path = ?)", (path,))
    connection.execute("DELETE FROM units WHERE path = ?", (path,))
    connection.execute("DELETE FROM files WHERE path = ?", (path,))


def _insert(connection: sqlite3.Connection, path: str, new: NewUnit) -> None:
    unit = new.unit
    values = (path, unit.kind, unit.name, unit.first, unit.last, unit.part, unit.text, new.digest, encode(new.vector))
    row = connection.execute(
        "INSERT INTO units (path, kind, name, first, last, part, text, digest, vector) VALUES (?,?,?,?,?,?,?,?,?)",
        values,
    ).lastrowid
    title, body = " ".join(words(f"{path} {unit.name}")), " ".join(words(unit.text))
    connection.execute("INSERT INTO words (rowid, title, body) VALUES (?, ?, ?)", (row, title, body))
