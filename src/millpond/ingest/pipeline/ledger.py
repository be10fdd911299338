"""RunLedger: what becomes of the records of a run: counts, times, dead letters, and the ids of the source."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from millpond.errors import SinkError
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.pipeline.verify import RecordSample
from millpond.ingest.record import Rejected
from millpond.ingest.sources.json_file import dump_record, dump_rejected
from millpond.ingest.telemetry.report import RunCounts
from millpond.ingest.telemetry.trace import RunTrace

if TYPE_CHECKING:
    from millpond.ingest.pipeline.embedder import PlannedRecord


logger = logging.getLogger(__name__)

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


class RunLedger:
    """Keeps account of a run. Any thread may use it."""

    def __init__(
        self, trace: RunTrace, dead_letters: DeadLetterFile | None = None, *, sync: bool = False, verify: bool = False
    ) -> None:
        self.counts = RunCounts()
        self.trace = trace
        self.seen = SeenRecords() if sync else None
        self.sample = RecordSample() if verify else None
        self.unknown_ids = 0
        self._dead_letters = dead_letters

    def reject(self, rejected: Rejected) -> None:
        """Leave out a line that holds no record."""
        self.counts.failed(rejected.where, rejected.reason)
        self.trace.note_failure(rejected.where, rejected.reason)
        if rejected.record_id is None:
            self.unknown_ids += 1
        elif self.seen is not None:
            self.seen.add([rejected.record_id])
        if self._dead_letters is not None:
            self._dead_letters.add(dump_rejected(rejected))

    def fail(self, planned: PlannedRecord, reason: str) -> None:
        """Leave out a record that cannot be embedded or stored."""
        where = f"record {planned.record.id!r}"
        self.counts.failed(where, reason)
        self.trace.note_failure(where, reason)
        if self.sample is not None:
            self.sample.drop(planned.key)
        if self._dead_letters is not None:
            self._dead_letters.add(dump_record(planned.record, where=where, reason=reason))

    def retrying(self, error: BaseException, seconds: float) -> None:
        """A request is sent again after some seconds."""
        self.counts.add(retried=1)
        self.trace.note_retry(str(error))
        logger.warning("%s; trying again in %.1f s", error, seconds)
