"""SourceIds: the row ids of a source, listed before the first row is read."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

from millpond.errors import SinkError
from millpond.ingest.sinks.collection import CollectionSink

_PAGE = 4096


class SourceIds:
    """The ids, in a temporary file that sqlite deletes: a copy may take hours, for which no database holds a scan."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # one thread at a time
        self._file.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._file.execute("PRAGMA journal_mode=OFF")

    def fill(self, source: CollectionSink[Any], stop: threading.Event) -> int:
        """List the ids of a collection, from the start again if some are listed.

        Args:
            source: The collection.
            stop: Ends the listing.

        Returns:
            How many there are.

        Raises:
            SinkError: The database does not answer, or there is no space for the ids.
        """
        rows = source.scan()
        try:
            self._file.execute("DELETE FROM ids")
            while not stop.is_set() and (page := list(islice(rows, _PAGE))):
                self._file.execute("BEGIN")
                self._file.executemany("INSERT OR IGNORE INTO ids VALUES (?)", ((row_id,) for row_id, _ in page))
                self._file.execute("COMMIT")
            return int(self._file.execute("SELECT COUNT(*) FROM ids").fetchone()[0])
        except sqlite3.Error as error:
            raise SinkError(
                f"the ids of the source cannot be kept in a temporary file ({error}); free some space, or set "
                "SQLITE_TMPDIR to another folder"
            ) from error

    def pages(self, size: int) -> Iterator[list[str]]:
        """The ids, each once, in their order.

        Args:
            size: Most ids of a page.

        Returns:
            An iterator of pages.
        """
        query, last = "SELECT id FROM ids WHERE id > ? ORDER BY id LIMIT ?", ""
        while page := [row_id for (row_id,) in self._file.execute(query, (last, size))]:
            yield page
            last = page[-1]
