"""RecentRows: rows of a cache in memory, of which the least recently used give way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

# Of a row beside its value: the key, numbers and places in a dict.
_ROW_BYTES = 400


class RecentRows:
    """Rows (key, id, meta, checksum, value) by key, of at most ``limit`` bytes. Any thread may use it.

    The child of a fork finds nothing: a thread of the parent may have held the lock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._rows: dict[bytes, tuple[Any, ...]] = {}  # the least recently used first
        self._bytes = 0
        self.changes = 0  # calls of `drop` and `clear`

    def find(self, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        """The rows of those keys that are here."""
        if self._pid != os.getpid():
            return []
        with self._lock:
            found = []
            for key in keys:
                if (row := self._rows.pop(key, None)) is not None:
                    self._rows[key] = row
                    found.append(row)
            return found

    def keep(self, rows: Iterable[tuple[Any, ...]], *, changes: int | None = None) -> int:
        """Add rows, unless others were removed since ``changes`` was read: they may be older than what is stored now.

        Returns how many rows gave way to them.
        """
        with self._lock:
            if changes not in (None, self.changes):
                return 0
            for row in rows:
                self._remove(row[0])
                self._rows[row[0]] = row
                self._bytes += _ROW_BYTES + len(row[4])
            before = len(self._rows)
            while self._bytes > self._limit:
                self._remove(next(iter(self._rows)))
            return before - len(self._rows)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove rows."""
        with self._lock:
            self.changes += 1
            for key in keys:
                self._remove(key)

    def clear(self) -> None:
        """Remove all rows; nothing in the child of a fork."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self.changes += 1
            self._rows.clear()
            self._bytes = 0

    def size(self) -> tuple[int, int]:
        """How many rows there are, and their bytes."""
        return len(self._rows), self._bytes

    def lengths(self) -> dict[int, int]:
        """Number of rows for each length of a value."""
        counts: dict[int, int] = {}
        with self._lock:
            for row in self._rows.values():
                counts[len(row[4])] = counts.get(len(row[4]), 0) + 1
        return counts

    def _remove(self, key: bytes) -> None:
        if (row := self._rows.pop(key, None)) is not None:
            self._bytes -= _ROW_BYTES + len(row[4])
