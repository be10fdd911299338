"""Deletions: the rows that a run may delete, which are counted before the first one goes."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from millpond.errors import InvalidRequestError, SinkError
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.pipeline.embedder import PlannedRecord, record_key
from millpond.ingest.pipeline.journal import CollectionEntries, JournalEntry
from millpond.ingest.pipeline.last_run import LastRun
from millpond.ingest.record import Record, point_id
from millpond.ingest.sinks.protocol import ChunkedRows, Deletes, Reads, Sink
from millpond.ingest.telemetry.report import RunCounts
from millpond.support.cached_property import cached_property

logger = logging.getLogger(__name__)


class DeletionsRefusedError(SinkError):
    """A run would delete more rows than it may, and has deleted none."""


_IDS_PER_SELECT = 500
_PAGE = 1024
_SCANNED_ROWS = 512
_REASONS = {"whose text is blank now": "blank", "that the source no longer has": "NOT blank"}
_TABLES = (
    "CREATE TABLE seen (id TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE blank (key TEXT PRIMARY KEY, id TEXT NOT NULL, chunk INTEGER NOT NULL, digest BLOB NOT NULL)",
    "CREATE TABLE pieces (row_id TEXT PRIMARY KEY) WITHOUT ROWID",  # that are records of their own, with a text
    "CREATE TABLE doomed (row INTEGER PRIMARY KEY, row_id TEXT NOT NULL, id TEXT NOT NULL, blank INTEGER NOT NULL)",
)


def check_share(sync_max: object) -> float:
    """The most that a run deletes, as a share of the collection; raises InvalidRequestError for anything else."""
    if isinstance(sync_max, bool) or not isinstance(sync_max, int | float) or not 0 <= sync_max <= 1:
        raise InvalidRequestError(
            f"sync_max={sync_max!r} must be a number from 0 to 1: the share of the collection's rows that a run may "
            "delete (1: all of them)"
        )
    return float(sync_max)


class Deletions:
    """Rows of records whose text is blank now, and in a sync of those that the source no longer has.

    They are collected while the source is read, in a temporary file that sqlite deletes, and deleted at the end, if
    they are few enough; else not one of them is. For one thread.

    Attributes:
        synced: Whether :meth:`finish` has left no row that the source no longer has.
    """

    def __init__(
        self,
        *,
        sync: bool = False,
        share: float = 0.5,
        rows_before: int | None = None,
        held: int | None = None,
        possible: bool = True,
    ) -> None:
        self._sync = sync
        self._share = share
        self._before = rows_before  # rows of the collection when the run began; `None` if they cannot be counted
        self._held = held  # rows before earlier syncs that did not end well; `None` without one
        self._possible = possible  # whether the sink can delete
        self.synced = False
        self._nameless = 0  # lines of the source that hold no record, and whose id is not known
        self._unread: set[str] = set()  # files that could not be read: the ids of their records begin so
        self._used = False

    def see(self, ids: Iterable[str]) -> None:
        """Records that the source has: a sync leaves their rows alone."""
        if self._sync:
            self._see(ids)

    def see_file(self, path: str) -> None:
        """A file that could not be read: a sync leaves all rows of its parts alone."""
        if self._sync:
            self._see([path])
            self._unread.add(path)

    def see_nameless(self) -> None:
        """A line of the source that holds no record, and might be any row's."""
        self._nameless += 1

    def note(self, blank: Sequence[PlannedRecord], texts: Sequence[Record]) -> None:
        """Records whose text is blank, and others, which may have been blank earlier in the source."""
        if not self._possible:
            return
        pieces = [record for record in texts if record.chunk]
        if self._before is None:
            self._see(record_key(record) for record in texts)
        if not (blank or pieces or self._used):
            return
        self._used = True
        with self._transaction() as file:
            file.executemany("DELETE FROM blank WHERE key = ?", ((record_key(record),) for record in texts))
            file.executemany(
                "INSERT OR REPLACE INTO blank VALUES (?, ?, ?, ?)",
                ((each.key, each.record.id, each.record.chunk, each.digest) for each in blank),
            )
            file.executemany("INSERT OR IGNORE INTO pieces VALUES (?)", ((point_id(p.id, p.chunk),) for p in pieces))

    def finish(
        self,
        sink: Sink,
        requests: RetryingWriter,
        entries: CollectionEntries | None,
        counts: RunCounts,
        last_run: LastRun,
    ) -> None:
        """Delete the rows, once the source was read to its end and everything else is written.

        Raises:
            DeletionsRefusedError: They are more than the run may delete, and all of them stay.
        """
        if not (self._used or self._sync):
            return
        now = counts.now()
        kept = now["cached"] + now["embedded"]
        if isinstance(sink, Reads):
            self._find_rows(sink, requests, kept)
            for doomed in self._doomed():
                last_run.begin(self._before)
                if entries is not None:  # first, since an entry without its row would never be written again
                    entries.remove({record_id for _, record_id in doomed})
                requests.send(partial(sink.delete_rows, [row_id for row_id, _ in doomed]))
                counts.add(deleted=len(doomed))
            self.synced = self._sync and not self._nameless
        elif isinstance(sink, Deletes):
            self._delete_uncounted(sink, requests, kept)
        else:
            return
        if entries is not None:
            for page in self._blank():
                entries.remove([key for key, *_ in page])
                entries.add(JournalEntry(key, digest, 0) for key, _, _, digest in page)

    def _see(self, ids: Iterable[str]) -> None:
        with self._transaction() as file:
            file.executemany("INSERT OR IGNORE INTO seen VALUES (?)", ((each,) for each in ids))

    def _delete_uncounted(self, sink: Deletes, requests: RetryingWriter, kept: int) -> None:
        """Delete blank records of a sink whose rows cannot be counted, if most records of the source are not blank."""
        earlier = "blank WHERE key NOT IN (SELECT id FROM seen)"  # the others were stored by this run
        blank = self._count(earlier)
        if blank > (self._share * (blank + kept) if kept else 0):
            logger.error(
                "nothing was deleted: the text of %d records is blank, beside %d others, which is more than "
                "sync_max=%g allows in a collection whose rows cannot be counted",
                blank,
                kept,
                self._share,
            )
            self._file.execute(f"DELETE FROM {earlier}")
        for page in self._blank():
            ids = [record_id for _, record_id, chunk, _ in page if chunk == 0]
            requests.send(partial(sink.delete, ids))

    def _find_rows(self, sink: Reads, requests: RetryingWriter, kept: int) -> None:
        """Note the rows to delete; raises DeletionsRefusedError if they are too many."""
        for page in self._blank():
            requests.send(partial(self._note_blank_rows, sink, page))
        own: int | None = None
        if self._sync and self._nameless:
            logger.error(
                "sync=True deleted nothing: %d records of the source could not be read, and their ids are not known; a "
                "row that the source seems to lack may be theirs. Mend them and run again",
                self._nameless,
            )
        elif self._sync:
            own = requests.send(partial(self._scan, sink, note=True))

        def held() -> int:
            rows = requests.send(partial(self._scan, sink)) if own is None else own
            rows -= requests.send(sink.count) - (self._before or 0)
            return rows if self._held is None else min(rows, self._held)

        if self._before != 0:  # else all rows are this run's own
            rows = {name: self._count(f"doomed WHERE {condition}") for name, condition in _REASONS.items()}
            self._check(rows, kept, held)

    def _check(self, doomed: Mapping[str, int], kept: int, held: Callable[[], int]) -> None:
        """Raise unless so many rows may be deleted of those that the collection held before the run."""
        rows = sum(doomed.values())
        if not rows:
            return
        total = held()
        why = ", ".join(f"{count} {name}" for name, count in doomed.items() if count)
        when = "" if self._held is None else " before syncs that did not end well"
        would = f"the run would delete {rows} of the {total} rows that the collection held{when} ({why})"
        if not kept:
            raise DeletionsRefusedError(
                f"{would}, though no record of the source was stored or is unchanged; nothing was deleted. If they are "
                "to go, delete them by sink.delete in Python"
            )
        if rows > self._share * total and self._share < 1:
            raise DeletionsRefusedError(
                f"{would}, and sync_max={self._share:g} allows {int(self._share * total)}; nothing was deleted, and "
                "everything else is written. If they are to go, run again with a larger sync_max, up to 1"
            )

    def _note_blank_rows(self, sink: Reads, page: Sequence[tuple[str, str, int, bytes]]) -> None:
        """Keep those rows of blank records that exist."""
        owners = {point_id(record_id, chunk): record_id for _, record_id, chunk, _ in page}
        found = {row_id: owners[row_id] for row_id in sink.fetch(list(owners))}
        if isinstance(sink, ChunkedRows):  # the last ones first, so that an interrupted deletion leaves no gap
            for _, record_id, chunk, _ in page:
                rest = sink.chunks_from({record_id: 1}) if chunk == 0 else ()
                found = {row_id: record_id for row_id in rest if not self._is_piece(row_id)} | found
        with self._transaction() as file:
            file.executemany("INSERT INTO doomed (row_id, id, blank) VALUES (?, ?, 1)", found.items())

    def _is_piece(self, row_id: str) -> bool:
        return self._file.execute("SELECT 1 FROM pieces WHERE row_id = ?", (row_id,)).fetchone() is not None

    def _scan(self, sink: Reads, *, note: bool = False) -> int:
        """How many rows are millpond's own; those whose record was not seen are kept, if they are to be noted."""
        count, rows = 0, sink.scan()
        if note:  # from the start again if the database did not answer
            self._file.execute("DELETE FROM doomed WHERE NOT blank")
        while page := list(islice(rows, _SCANNED_ROWS)):
            own = [(row_id, record_id) for row_id, record_id in page if row_id != record_id]
            count += len(own)
            if note:
                self._note_unseen(own)
        return count

    def _note_unseen(self, own: Sequence[tuple[str, str]]) -> None:
        known: set[str] = set()
        for start in range(0, len(own), _IDS_PER_SELECT):
            part = [record_id for _, record_id in own[start : start + _IDS_PER_SELECT]]
            query = f"SELECT id FROM seen WHERE id IN ({','.join('?' * len(part))})"
            known.update(each for (each,) in self._file.execute(query, part))
        with self._transaction() as file:
            unseen = (row for row in own if row[1] not in known and not self._is_of_unread(row[1]))
            file.executemany("INSERT INTO doomed (row_id, id, blank) VALUES (?, ?, 0)", unseen)

    def _is_of_unread(self, record_id: str) -> bool:
        """Whether a record is a part of a file that could not be read; a path may itself hold a #."""
        if not self._unread:
            return False
        ends = (place for place, character in enumerate(record_id) if character == "#")
        return any(record_id[:end] in self._unread for end in ends)

    def _count(self, table: str) -> int:
        return int(self._file.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])

    def _blank(self) -> Iterator[list[tuple[str, str, int, bytes]]]:
        """Pages of key, id, number and digest of the blank records."""
        last = ""
        query = "SELECT key, id, chunk, digest FROM blank WHERE key > ? ORDER BY key LIMIT ?"
        while page := self._file.execute(query, (last, _PAGE)).fetchall():
            yield page
            last = page[-1][0]

    def _doomed(self) -> Iterator[list[tuple[str, str]]]:
        """Pages of row id and record id of the rows to delete."""
        last = 0
        query = "SELECT row, row_id, id FROM doomed WHERE row > ? ORDER BY row LIMIT ?"
        while page := self._file.execute(query, (last, _PAGE)).fetchall():
            yield [(row_id, record_id) for _, row_id, record_id in page]
            last = page[-1][0]

    @cached_property
    def _file(self) -> sqlite3.Connection:
        """A private file, deleted when it is closed."""
        file = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # one thread at a time
        for table in _TABLES:
            file.execute(table)
        file.execute("PRAGMA journal_mode=OFF")
        return file

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        try:
            self._file.execute("BEGIN")
            yield self._file
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise SinkError(
                f"the ids of the source cannot be kept in a temporary file ({error}); free some space, or set "
                "SQLITE_TMPDIR to another folder"
            ) from error
