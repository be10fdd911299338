"""DeadLetterFile: the records that a run left out, in a file that is a source itself."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from millpond.errors import InvalidRequestError

# The lines of a larger file are not compared with new ones, which are appended even if they are there.
_MAX_COMPARED = 64 << 20


class DeadLetterFile:
    """A JSONL file with one dead letter for every record that was left out.

    A line that is in the file is not appended again, so running again does not grow it. The first letter creates the
    file, readable by its owner only (0600), since it holds texts. Any thread may add.

    Args:
        path: The file.
        source: What the run reads. If it is this very file, the letters go to a new one, which replaces it at the end.

    Raises:
        InvalidRequestError: The path is a folder, or its folder does not exist.
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
        self._replaces = isinstance(source, str | os.PathLike) and _same_file(source, self.path)
        self._written = self.path.with_name(f"{self.path.name}.next") if self._replaces else self.path
        self._file: TextIO | None = None
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        if self._replaces:
            self._written.unlink(missing_ok=True)

    def add(self, letter: str) -> None:
        """Append a letter, a line of :mod:`~millpond.ingest.dead_letter` without its end.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            if self._file is None:
                self._file = self._open()
            name = _name(letter)
            if name not in self._known:
                self._file.write(letter + "\n")
                self._file.flush()
                self._known.add(name)

    def close(self, *, complete: bool = False) -> None:
        """Close the file; of a run that read the old one to its end, the new one takes its place."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            if self._replaces and complete:
                if self._file is not None:
                    os.replace(self._written, self.path)
                else:
                    self.path.unlink(missing_ok=True)

    def _open(self) -> TextIO:
        descriptor = os.open(self._written, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="backslashreplace", newline="\n")
        torn = False
        if os.fstat(descriptor).st_size <= _MAX_COMPARED:
            file.seek(0)
            with suppress(UnicodeDecodeError):  # not written by a run
                for line in file:
                    self._known.add(_name(line.removesuffix("\n")))
                    torn = not line.endswith("\n")
            file.seek(0, os.SEEK_END)
        if torn:  # by a run that was killed
            file.write("\n")
        return file


def _name(line: str) -> bytes:
    return blake2b(line.encode("utf-8", "backslashreplace"), digest_size=8).digest()


def _same_file(source: str | os.PathLike[str], path: Path) -> bool:
    try:
        return os.path.samefile(os.path.expanduser(source), path)
    except OSError:
        return False
