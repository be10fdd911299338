"""DeadLetters: the records that a run left out, in a file that is a source itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from millpond.errors import InvalidRequestError

DEAD_LETTER_KEY = "millpond_dead_letter"
"""The key by which a line of the file is known."""

_SCHEMA = 1
# Lines of a larger file are not compared with new ones, which are appended even if they are there.
_MAX_COMPARED = 64 << 20


class DeadLetters:
    """A JSONL file with one object for every record that was left out: its content, where it was, and the reason.

    A line that is in the file is not appended again, so running again does not grow it. The file is created by the first
    letter, readable by its owner only (0600), since it holds texts.

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
                f"dead_letters={str(path)!r} is a folder; name a file, as {self.path / 'dead.jsonl'}"
            )
        if not self.path.parent.is_dir():
            raise InvalidRequestError(
                f"dead_letters={str(path)!r}: there is no folder {str(self.path.parent)!r}; create it first"
            )
        self._replaces = isinstance(source, str | os.PathLike) and _same_file(source, self.path)
        self._target = self.path.with_name(f"{self.path.name}.next") if self._replaces else self.path
        self._file: TextIO | None = None
        self._known: set[bytes] = set()
        if self._replaces:
            self._target.unlink(missing_ok=True)

    def add(self, letter: Mapping[str, Any]) -> None:
        """Append a letter: ``reason`` and ``where``, with ``id``, ``text``, ``metadata``, or ``content`` of a line."""
        line = json.dumps({DEAD_LETTER_KEY: _SCHEMA, **letter}, ensure_ascii=False)
        if self._file is None:
            self._file = self._open()
        name = _name(line)
        if name not in self._known:
            self._known.add(name)
            self._file.write(line + "\n")
            self._file.flush()

    def close(self, *, complete: bool = False) -> None:
        """Close the file; of a run that read the old one to its end, the new one takes its place."""
        if self._file is not None:
            self._file.close()
        if self._replaces and complete:
            if self._target.exists():
                os.replace(self._target, self.path)
            else:
                self.path.unlink(missing_ok=True)

    def _open(self) -> TextIO:
        descriptor = os.open(self._target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "a+", encoding="utf-8", errors="backslashreplace")
        torn = False
        with suppress(OSError):
            if os.fstat(descriptor).st_size <= _MAX_COMPARED:
                file.seek(0)
                for line in file:
                    self._known.add(_name(line.rstrip("\n")))
                    torn = not line.endswith("\n")
        if torn:  # the last line of a run that was killed
            file.write("\n")
        return file


def _name(line: str) -> bytes:
    return blake2b(line.encode("utf-8", "backslashreplace"), digest_size=8).digest()


def _same_file(source: str | os.PathLike[str], path: Path) -> bool:
    try:
        return os.path.samefile(os.path.expanduser(source), path)
    except OSError:
        return False
