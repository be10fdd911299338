"""FolderSource: a folder of files that changes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millpond.ingest.pipeline.journal import CollectionEntries
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.files.file_records import MARK, file_records
from millpond.ingest.sources.folder import check_folder, reads_file, walk_folder
from millpond.ingest.sources.ignore import IGNORE_FILE
from millpond.ingest.sources.read import RecordReader
from millpond.ingest.watch.notices import Notices
from millpond.ingest.watch.source import Changes

logger = logging.getLogger(__name__)

# A file that is being written is read when it has not changed for so long, or after so long in any case.
QUIET_SECONDS, LONGEST_SECONDS = 0.2, 10.0
# The system drops notices when many come at once: after the last of them all files are looked at once more.
_SETTLE_SECONDS = 60.0
_MANY = 1000  # paths of which a look at all files is faster than one at each

Stamp = tuple[int, int, int, int]


@dataclass(slots=True)
class _Noticed:
    """A file that has changed, or may have."""

    first: float  # when it was noticed
    last: float  # when it was last seen to change
    stamp: Stamp | None


class FolderSource:
    """The files of a folder.

    Args:
        folder: The folder.
        poll: Look at all files every so many seconds; ``None``: when the system says that one has changed.
    """

    def __init__(self, folder: Path, *, poll: float | None = None) -> None:
        self.folder = folder.resolve()
        self._poll = poll
        self._notices = None if poll is not None else Notices(self.folder, self._note, self._note_all)
        self._lock = threading.Lock()
        self._paths: dict[str, float] = {}  # as the system names them, and when it did
        self._all: float | None = None  # since when all files are to be looked at
        self._wake: Callable[[], None] = lambda: None
        self._stamps: dict[str, Stamp | None] = {}  # of the files as they were read
        self._noticed: dict[str, _Noticed] = {}
        self._taken: dict[str, _Noticed] = {}  # by changes that are not accepted yet
        self._look: float | None = None  # when to look at all files again

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to notice changes."""
        self._wake = wake
        check_folder(self.folder)
        if self._notices is not None:
            self._notices.start()
        else:
            self._look = time.monotonic() + (self._poll or 0)

    def stop(self) -> None:
        """End the noticing."""
        if self._notices is not None:
            self._notices.stop()

    def full(self) -> RecordReader:
        """All files."""
        return RecordReader(self._read_all())

    def _read_all(self) -> Iterator[Record | Rejected]:
        for found in walk_folder(self.folder):
            if isinstance(found, Rejected):
                yield found
            else:
                self._stamps[found] = self._stamp(found)
                yield from file_records(self.folder / found, found)

    def is_there(self) -> bool:
        """Whether the folder exists."""
        return self.folder.is_dir()

    def oldest(self) -> float | None:
        """When the oldest change was noticed that is not accepted."""
        with self._lock:
            times = [*self._paths.values(), *([] if self._all is None else [self._all])]
        for each in (*list(self._noticed.values()), *list(self._taken.values())):
            times.append(each.first)
        return min(times, default=None)

    def due(self) -> float | None:
        """When a file may have come to rest, or all are to be looked at."""
        times = [_ready(each) for each in self._noticed.values()]
        times += [] if self._look is None else [self._look]
        return min(times, default=None)

    def changes(self, entries: CollectionEntries) -> Changes | None:
        """The files that have changed and come to rest."""
        self._noticed = self._taken | self._noticed
        self._taken = {}
        if not self.is_there():
            self._look = time.monotonic() + (self._poll or _SETTLE_SECONDS)
            return None
        self._sort_notices()
        now, taken = time.monotonic(), {}
        for name, noticed in list(self._noticed.items()):
            stamp = self._stamp(name)
            if stamp != noticed.stamp:
                noticed.stamp, noticed.last = stamp, now
            if _ready(noticed) <= now:
                taken[name] = self._noticed.pop(name)
        if not taken:
            return None
        self._taken = taken
        unread: set[str] = set()
        stamps: dict[str, Stamp | None] = {}

        def gone(seen: set[str]) -> Iterable[str]:
            for name in taken:
                if name not in unread:
                    yield from (
                        each for each in entries.of_file(name, MARK) if each not in seen and self._owns(name, each)
                    )

        def accept() -> None:
            for name, stamp in stamps.items():
                if stamp is None:
                    self._stamps.pop(name, None)
                else:
                    self._stamps[name] = stamp
            self._taken = {}

        return Changes(records=self._read(taken, stamps, unread), gone=gone, accept=accept)

    def _read(
        self, names: Iterable[str], stamps: dict[str, Stamp | None], unread: set[str]
    ) -> Iterator[Record | Rejected]:
        for name in names:
            path = self.folder / name
            stamp = self._stamp(name)
            if stamp is None or not reads_file(self.folder, name):
                stamps[name] = None
                continue
            stamps[name] = stamp
            for item in file_records(path, name):
                if isinstance(item, Rejected) and item.parts:
                    if self._stamp(name) is None:  # it went while it was read: no file is broken
                        stamps[name] = None
                        break
                    unread.add(name)
                yield item

    def _owns(self, name: str, record_id: str) -> bool:
        """Whether a record is of a file, and not of one whose path has a # and begins with this one's."""
        ends = [place for place, character in enumerate(record_id) if character == MARK]
        for end in reversed([*ends, len(record_id)]):
            if record_id[:end] == name:
                return True
            if record_id[:end] in self._stamps:
                return False
        return False

    def _sort_notices(self) -> None:
        """Make names of files of what was noticed, and look at all files if it is time for that."""
        now = time.monotonic()
        with self._lock:
            paths, self._paths = self._paths, {}
            since, self._all = self._all, None
        if self._look is not None and now >= self._look:
            since, self._look = now if since is None else since, None
        if paths and self._notices is not None:
            self._look = now + _SETTLE_SECONDS
        if self._notices is None and self._look is None:
            self._look = now + (self._poll or 0)
        if len(paths) > _MANY:
            since = min(paths.values()) if since is None else min(since, *paths.values())
        if since is not None:
            self._look_at_all(since)
        else:
            for path, first in paths.items():
                self._sort(path, first)

    def _sort(self, path: str, first: float) -> None:
        name = os.path.relpath(path, self.folder).replace(os.sep, "/")
        if name == "." or os.path.basename(path) == IGNORE_FILE:
            self._look_at_all(first)
        elif name.startswith("../"):
            pass
        elif os.path.isdir(path):
            if not os.path.islink(path) and reads_file(self.folder, f"{name}/x.txt"):
                for found in walk_folder(self.folder, below=name):
                    if isinstance(found, str):
                        self._mark(found, first)
        elif os.path.lexists(path):
            if name in self._stamps or reads_file(self.folder, name):
                self._mark(name, first)
        else:
            for known in (
                [name] if name in self._stamps else [each for each in self._stamps if each.startswith(f"{name}/")]
            ):
                self._mark(known, first)

    def _look_at_all(self, first: float) -> None:
        """Mark every file whose stamp is another one, that is new, and that is gone."""
        found = {name for name in walk_folder(self.folder) if isinstance(name, str)}
        for name in found:
            if self._stamps.get(name) != self._stamp(name):
                self._mark(name, first)
        for name in self._stamps.keys() - found:
            self._mark(name, first)

    def _mark(self, name: str, first: float) -> None:
        if (noticed := self._noticed.get(name)) is None:
            self._noticed[name] = _Noticed(first, first, self._stamp(name))
        else:
            noticed.last = max(noticed.last, first)

    def _stamp(self, name: str) -> Stamp | None:
        """What changes with the file; ``None`` if it is not there; one that cannot be read is."""
        try:
            status = os.stat(os.path.join(self.folder, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return 0, 0, 0, -(error.errno or 1)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def _note(self, paths: Iterable[str]) -> None:
        now = time.monotonic()
        with self._lock:
            for path in paths:
                self._paths.setdefault(path, now)
        self._wake()

    def _note_all(self) -> None:
        with self._lock:
            self._all = time.monotonic() if self._all is None else self._all
        self._wake()


def _ready(noticed: _Noticed) -> float:
    """When a file may be read."""
    return min(noticed.last + QUIET_SECONDS, noticed.first + LONGEST_SECONDS)
