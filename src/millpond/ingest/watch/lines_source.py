"""LinesSource: a file of JSONL that grows, or is cut, rotated or replaced."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from millpond.errors import SourceNotFoundError
from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.json_file import read_json_lines
from millpond.ingest.sources.lines import MAX_RECORD_BYTES
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.sources.rows import Columns, RowReader
from millpond.ingest.watch.notices import Notices
from millpond.ingest.watch.source import Changes

SUFFIXES = (".jsonl", ".ndjson")
# Of what was read: if both ends are the same in the same file, it has only grown.
_COMPARED = 1 << 16


@dataclass(frozen=True)
class _Read:
    """What was read of a file."""

    inode: int
    modified: int
    size: int  # of the file, with an end that was not read
    end: int = 0  # of the last whole line
    lines: int = 0
    head: bytes = b""
    tail: bytes = b""


class LinesSource:
    """A file of JSONL.

    A line is read when it ends, or as soon as it is a whole value of JSON; what is no JSON yet is waited for.

    Args:
        path: The file.
        columns: The keys of its objects.
        poll: Look at the file every so many seconds; ``None``: when the system says that it has changed.
    """

    def __init__(self, path: Path, columns: Columns, *, poll: float | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        if not self.path.is_file():
            raise SourceNotFoundError(f"there is no file at {str(path)!r}; a file to watch is there at the start")
        self._columns, self._poll = columns, poll
        self._rows = RowReader(str(path), columns)
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._since: float | None = None  # when the oldest change was noticed
        self._read = _Read(0, 0, 0)
        self._reading = self._read
        self._look = 0.0
        folder = self.path.parent
        self._notices = None if poll is not None else Notices(folder, self._note, self._changed, recursive=False)

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to notice changes."""
        self._wake = wake
        if self._notices is not None:
            self._notices.start()

    def stop(self) -> None:
        """End the noticing."""
        if self._notices is not None:
            self._notices.stop()

    def is_there(self) -> bool:
        """Whether the file exists: one that is rotated may be away for a moment."""
        return self.path.is_file()

    def oldest(self) -> float | None:
        """When the oldest change was noticed that is not accepted."""
        return self._since

    def due(self) -> float | None:
        """When to look again, if the file is polled."""
        return None if self._poll is None else self._look

    def full(self) -> RecordReader:
        """All lines."""

        def items() -> Iterator[Record | Rejected]:
            yield from self._lines(_Read(0, 0, 0))
            self._read = self._reading

        return RecordReader(items())

    def changes(self, entries: CollectionEntries) -> Changes | None:
        """The lines that were added; if the file is another one, all of them."""
        self._look = time.monotonic() + (self._poll or 0)
        since, known = self._since, self._read
        try:
            status = self.path.stat()
        except OSError:  # it is being replaced
            return None
        if (status.st_ino, status.st_mtime_ns, status.st_size) == (known.inode, known.modified, known.size):
            self._settle(since)
            return None
        if since is None:
            self._changed(wake=False)
            since = self._since
        grown = self._has_grown(known, status)

        def gone(seen: set[str]) -> Iterable[str]:
            if not grown:
                for page in entries.pages():
                    yield from (entry.id for entry in page if entry.chunks and entry.id not in seen)

        def accept() -> None:
            self._read = self._reading
            self._settle(since)

        return Changes(records=self._lines(known if grown else _Read(0, 0, 0)), gone=gone, accept=accept)

    def _has_grown(self, known: _Read, status: os.stat_result) -> bool:
        """Whether the file has what was read of it, and more."""
        if status.st_ino != known.inode or status.st_size < known.size or status.st_size == known.end:
            return False
        with self.path.open("rb") as file:
            return os.fstat(file.fileno()).st_ino == known.inode and _ends(file, known.end) == (known.head, known.tail)

    def _lines(self, known: _Read) -> Iterator[Record | Rejected]:
        """The records behind what is known; then ``_reading`` is what was read."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            end = _last_end(file, known.end, status.st_size)
            stop = status.st_size if end < status.st_size and _is_value(file, end, status.st_size) else end
            part = _Part(file, known.end, stop)
            yield from read_json_lines(io.BufferedReader(part), str(self.path), self._rows, first=known.lines + 1)
            head, tail = _ends(file, end)
        lines = known.lines + part.lines
        self._reading = _Read(status.st_ino, status.st_mtime_ns, status.st_size, end, lines, head, tail)

    def _note(self, paths: Iterable[str]) -> None:
        if str(self.path) in paths:
            self._changed()

    def _changed(self, *, wake: bool = True) -> None:
        with self._lock:
            self._since = time.monotonic() if self._since is None else self._since
        if wake:
            self._wake()

    def _settle(self, since: float | None) -> None:
        """What was noticed up to now is accepted, but not what was noticed since."""
        with self._lock:
            if self._since == since:
                self._since = None


class _Part(io.RawIOBase):
    """A part of a file as a file, of which the line ends are counted."""

    def __init__(self, file: BinaryIO, start: int, stop: int) -> None:
        super().__init__()
        self._file, self._left, self.lines = file, stop - start, 0
        file.seek(start)

    def readable(self) -> bool:
        """As of every file that is read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read on, up to the end of the part."""
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        self.lines += data.count(b"\n")
        return len(data)


def _ends(file: BinaryIO, end: int) -> tuple[bytes, bytes]:
    """Digests of the first and the last bytes before a place."""
    file.seek(0)
    head = file.read(min(_COMPARED, end))
    file.seek(max(0, end - _COMPARED))
    tail = file.read(min(_COMPARED, end))
    return blake2b(head, digest_size=16).digest(), blake2b(tail, digest_size=16).digest()


def _last_end(file: BinaryIO, start: int, size: int) -> int:
    """Behind the last line end in a part of a file; its start, if there is none."""
    stop = size
    while stop > start:
        first = max(start, stop - _COMPARED)
        file.seek(first)
        if (place := file.read(stop - first).rfind(b"\n")) >= 0:
            return first + place + 1
        stop = first
    return start


def _is_value(file: BinaryIO, start: int, stop: int) -> bool:
    """Whether a last line without an end is whole."""
    if stop - start > MAX_RECORD_BYTES:
        return False
    file.seek(start)
    try:
        return isinstance(json.loads(file.read(stop - start)), dict)
    except (ValueError, RecursionError):
        return False
