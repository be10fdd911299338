"""SharedSink: a database that many processes may write at the same time: one table of a file of sqlite."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from contextlib import closing, contextmanager, suppress

import numpy as np

from millpond.errors import FingerprintMismatchError, InvalidRequestError, SinkRejectedError, SinkUnavailableError
from millpond.ingest import StoredRow, content_hash, point_id


class SharedSink:
    """Rows in a file.

    ``refuse`` is a text that is not stored, ``kill_text`` one whose writer dies, ``slow_text`` one that takes seconds.
    ``busy`` and ``kill`` are files: the first write that finds one removes it, and fails, or dies after its commit.
    """

    embedded = False

    def __init__(self, path, *, dimensions=None, refuse=None, busy=None, kill=None, kill_text=None, slow_text=None):
        self.dimensions, self.path, self.target = dimensions, str(path), f"shared:{path}"
        self._refuse, self._busy, self._kill = refuse, busy, kill
        self._kill_text, self._slow_text = kill_text, slow_text
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS model (fingerprint TEXT)")
            database.execute(
                "CREATE TABLE IF NOT EXISTS points (row TEXT PRIMARY KEY, record TEXT, chunk INTEGER, text TEXT, "
                "metadata TEXT, vectors TEXT, writer INTEGER)"
            )

    @contextmanager
    def _open(self):
        """A connection for a block, which is committed at its end."""
        with closing(sqlite3.connect(self.path, timeout=60)) as database:
            yield database
            database.commit()

    def prepare(self, spec, *, chunked=False):
        with self._open() as database:
            stored = database.execute("SELECT fingerprint FROM model").fetchone()
            if stored is None:
                database.execute("INSERT INTO model VALUES (?)", (spec.fingerprint,))
            elif stored[0] != spec.fingerprint:
                raise FingerprintMismatchError("the file was filled by another model")

    def check(self, record):
        if record.text == "unstorable":
            raise InvalidRequestError("a row that no request could carry")

    def write(self, batch):
        if self._slow_text in {record.text for record in batch.records}:
            time.sleep(2)
        if self._kill_text in {record.text for record in batch.records}:
            os.kill(os.getpid(), signal.SIGKILL)
        # A worker that dies takes its count of retries along.
        if (self._kill is None or not os.path.exists(self._kill)) and self._happens(self._busy):
            raise SinkUnavailableError("too busy")
        if self._refuse in {record.text for record in batch.records}:
            raise SinkRejectedError("the database does not like one of them")
        with self._open() as database:
            for index, (row_id, record) in enumerate(zip(batch.ids, batch.records, strict=True)):
                vectors = {width: rows[index].tolist() for width, rows in batch.vectors.items()}
                row = (record.id, record.chunk, record.text, json.dumps(record.metadata), json.dumps(vectors))
                database.execute("REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?)", (row_id, *row, os.getpid()))
        if self._happens(self._kill):  # the rows are stored, and nobody hears of it
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _happens(path):
        """Whether the file was there; it is removed."""
        with suppress(FileNotFoundError, TypeError):
            os.unlink(path)
            return True
        return False

    def delete(self, ids):
        with self._open() as database:
            database.executemany("DELETE FROM points WHERE record = ?", [(each,) for each in ids])

    def delete_rows(self, row_ids):
        with self._open() as database:
            database.executemany("DELETE FROM points WHERE row = ?", [(each,) for each in row_ids])

    def count(self):
        with self._open() as database:
            return database.execute("SELECT COUNT(*) FROM points").fetchone()[0]

    def fetch(self, row_ids, *, widths=()):
        found = {}
        with self._open() as database:
            for row_id in row_ids:
                row = database.execute("SELECT record, text, vectors FROM points WHERE row = ?", (row_id,)).fetchone()
                if row is not None:
                    vectors = {int(name): np.array(each, dtype=np.float32) for name, each in json.loads(row[2]).items()}
                    found[row_id] = StoredRow(
                        record_id=row[0],
                        content_hash=content_hash(row[1]),
                        vectors={width: vectors[width] for width in widths},
                    )
        return found

    def scan(self):
        with self._open() as database:
            yield from database.execute("SELECT row, record FROM points").fetchall()

    def chunks_from(self, first):
        with self._open() as database:
            rows = [
                (record, number)
                for record, start in first.items()
                for (number,) in database.execute(
                    "SELECT chunk FROM points WHERE record = ? AND chunk >= ? ORDER BY chunk DESC", (record, start)
                )
            ]
        return [point_id(record, number) for record, number in rows]

    def close(self):
        pass

    @property
    def rows(self):
        """For each row id (record id, chunk, text, metadata, {width: vector})."""
        with self._open() as database:
            return {
                row[0]: (*row[1:4], json.loads(row[4]), {int(n): np.array(v) for n, v in json.loads(row[5]).items()})
                for row in database.execute("SELECT * FROM points")
            }

    @property
    def writers(self):
        """Process ids of those who wrote the rows."""
        with self._open() as database:
            return {pid for (pid,) in database.execute("SELECT DISTINCT writer FROM points")}
