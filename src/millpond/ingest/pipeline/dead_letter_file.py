"""DeadLetterFile: the records that a run left out, in a file that is a source itself."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from millpond.errors import InvalidRequestError, JournalError
from millpond.ingest.sources.json_file import DEAD_LETTER_KEY
from millpond.ingest.sources.lines import read_lines

# The lines of a larger file are not compared with new ones, which are appended even if they are there.
_MAX_COMPARED = 64 << 20
_START = f'{{"{DEAD_LETTER_KEY}": '.encode()


class DeadLetterFile:
    """A JSONL file with one dead letter for every record that was left out.

    A line that is in the file is not appended again, so running again does not grow it. The first letter creates the
    file, readable by its owner only (0600), since it holds texts. Any thread may add.
    """

    def __init__(self, path: str | os.PathLike[str], *, source: object = None) -> None:
        self.path = Path(path).expanduser().absolute()
        if self.path.is_dir():
            raise InvalidRequestError(
                f"dead_letters={str(path)!r} is a folder; name a file, as {str(self.path / 'dead.jsonl')!r}"
            )
        if not self.path.parent.is_dir():
            raise InvalidRequestError(
                f"dead_letters={str(path)!r}: there is no folder {str(self.path.parent)!r}; create it first"
            )
        self.replaces = False
        if isinstance(source, str | os.PathLike):
            with suppress(OSError):
                self.replaces = self.path.is_file() and os.path.samefile(os.path.expanduser(source), self.path)
        if self.path.is_file() and (line := _foreign_line(self.path)) is not None:
            raise InvalidRequestError(
                f"dead_letters={str(path)!r}: line {line} of this file is not a dead letter, so nothing is written to "
                "it; name another file"
            )
        self._written = self.path.with_name(f"{self.path.name}.next") if self.replaces else self.path
        self._file: FileIO | None = None
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        if self.replaces:
            self._written.unlink(missing_ok=True)

    def add(self, letter: str) -> None:
        """Append a letter, a line of :mod:`~millpond.ingest.sources.json_file` without its end."""
        with self._lock, self._errors():
            if self._file is None:
                self._file = self._open()
            line = letter.encode("utf-8", "backslashreplace")
            name = _name(line)
            if name not in self._known:
                # At once, so that no other run's line comes between. What stays of one that does not fit is torn.
                if self._file.write(line + b"\n") != len(line) + 1:
                    self._file.close()
                    self._file = None
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._known.add(name)

    def close(self, *, complete: bool = False) -> None:
        """Close the file; the next letter opens it. Of a run that read the old one to its end, it takes its place."""
        with self._lock, self._errors():
            written, self._file = self._file, None
            if written is not None:
                written.close()
            if self.replaces and complete:
                if written is not None:
                    os.replace(self._written, self.path)
                else:
                    self.path.unlink(missing_ok=True)

    def _open(self) -> FileIO:
        descriptor = os.open(self._written, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        status = os.fstat(descriptor)
        size = status.st_size
        # A pipe, a terminal or a device (/dev/stderr) holds no lines of earlier runs, and reading it may never end.
        if stat.S_ISREG(status.st_mode) and size <= _MAX_COMPARED:
            with open(self._written, "rb") as lines:
                self._known.update(_name(line.removesuffix(b"\n")) for line in lines)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # torn by a run that was killed, or a full disk
            os.write(descriptor, b"\n")
        return FileIO(descriptor, "r+")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalError(
                f"the dead letters {self._written} cannot be written ({error}); free some space, make the file "
                "writable, or choose another path"
            ) from error


def _name(line: bytes) -> bytes:
    return blake2b(line, digest_size=8).digest()


def _foreign_line(path: Path) -> int | None:
    """The first line that is not a dead letter, in a file that a run may then neither replace nor append to."""
    with path.open("rb") as lines:
        for number, line in enumerate(read_lines(lines), 1):
            if isinstance(line, int):
                return number
            if line.startswith(_START) or _START.startswith(line.strip()):  # a blank one too, or a torn one
                continue
            try:
                letter = json.loads(line)
            except (ValueError, RecursionError):
                return number
            if not (isinstance(letter, dict) and DEAD_LETTER_KEY in letter):
                return number
    return None
