"""JSON sources: one object a line (.jsonl, .ndjson), or one array of objects (.json)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.compression import open_source
from millpond.ingest.sources.dead_letter import DEAD_LETTER_KEY, read_dead_letter
from millpond.ingest.sources.rows import RowReader

BOM = b"\xef\xbb\xbf"
# Characters read at a time; of an object that is longer, twice as many each time, so that it is not parsed too often.
_CHUNK_CHARS = 1 << 16
_MAX_OBJECT_CHARS = 1 << 28
_LONGEST_WORD = 16  # more than -Infinity and an escaped pair of surrogates
_AFTER_NUMBER = tuple(" \t\r\n,]")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def read_jsonl(path: Path, reader: RowReader) -> Generator[Record | Rejected, None, None]:
    """The records of a file with one object a line."""
    with open_source(path) as file:
        yield from read_json_lines(file, str(path), reader)


def read_json_lines(lines: BinaryIO, name: str, reader: RowReader) -> Iterator[Record | Rejected]:
    """The records of a stream with one object a line; blank lines are skipped."""
    for number, line in enumerate(lines, start=1):
        data = line.removeprefix(BOM) if number == 1 else line
        if data.strip():
            yield _line(data, f"{name}:{number}", reader)


def _line(data: bytes, where: str, reader: RowReader) -> Record | Rejected:
    row: object = None
    try:
        row = json.loads(data.decode())
        if type(row) is dict and DEAD_LETTER_KEY not in row:  # nearly all
            return reader.record(row)
        return _record(row, "line", where, reader)
    except InvalidRequestError as error:
        reason = str(error)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({error})"
    content = data.decode(errors="backslashreplace").strip()
    return Rejected(where=where, reason=reason, content=content, record_id=reader.id_of(row))


def read_json(path: Path, reader: RowReader) -> Generator[Record | Rejected, None, None]:
    """The records of a file with one array of objects, read as a stream; also objects without an array around them.

    Raises:
        InvalidRequestError: The file is not JSON from some place on; raised after the records before it.
    """
    with open_source(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        elements = _elements(text, str(path))
        try:
            for index, element in enumerate(elements):
                where = f"{path}[{index}]"
                try:
                    yield _record(element, "element", where, reader)
                except InvalidRequestError as error:
                    yield reader.rejected(element, where, str(error))
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{str(path)!r} is not UTF-8 ({error.reason}); convert the file") from None


def _record(row: object, noun: str, where: str, reader: RowReader) -> Record | Rejected:
    if not isinstance(row, dict):
        raise InvalidRequestError(f"the {noun} is a JSON {type(row).__name__}, not an object")
    return read_dead_letter(row, where, reader) if DEAD_LETTER_KEY in row else reader.record(row)


def _elements(text: TextIO, name: str) -> Iterator[Any]:
    """The elements of the array, or the values one after another if there is no array."""
    window = _Window(text)
    window.skip_space()
    array = window.take("[")
    count = 0
    while not window.at_end():
        if array and window.take("]"):
            window.skip_space()
            if not window.at_end():
                raise InvalidRequestError(f"{name!r} goes on after its array; write one array, or a .jsonl")
            return
        if array and count and not window.take(","):
            raise InvalidRequestError(f"{name!r}: no comma after element {count - 1} of its array")
        try:
            yield window.value()
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{name!r}: element {count} is not JSON ({error}); nothing after it was read"
            ) from None
        count += 1
        window.skip_space()
    if array:
        raise InvalidRequestError(f"{name!r} ends within its array, after {count} elements")


class _Window:
    """The part of a text that is being parsed."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._chars = ""
        self._position = 0
        self._ended = False

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self._position == len(self._chars) and not self._more(_CHUNK_CHARS)

    def skip_space(self) -> None:
        """Move to the next character that is not white space."""
        while not self.at_end():
            self._position = _SPACE.match(self._chars, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._chars):
                return

    def take(self, character: str) -> bool:
        """Move past a character and the space after it, if it is the next one."""
        if self.at_end() or self._chars[self._position] != character:
            return False
        self._position += 1
        self.skip_space()
        return True

    def value(self) -> Any:
        """Parse one value. Raises ValueError if there is none."""
        chunk = _CHUNK_CHARS
        while True:
            try:
                value, end = _DECODER.raw_decode(self._chars, self._position)
            except json.JSONDecodeError as error:
                if self._is_complete(error) or not self._more(chunk):
                    raise
            else:
                # A number might go on in what was not read yet.
                ends = isinstance(value, dict | list | str) or self._chars[end : end + 1] in _AFTER_NUMBER
                if ends or not self._more(chunk):
                    self._position = end
                    return value
            chunk *= 2

    def _is_complete(self, error: json.JSONDecodeError) -> bool:
        """Whether an error does not come from the end of the window, so that reading more would not help."""
        size = len(self._chars)
        if size - self._position > _MAX_OBJECT_CHARS:
            return True
        return error.pos < size - _LONGEST_WORD and not error.msg.startswith("Unterminated string")

    def _more(self, size: int) -> bool:
        """Read more characters behind those not parsed yet; whether there were any."""
        if self._ended:
            return False
        data = self._text.read(size)
        if not data:
            self._ended = True
            return False
        self._chars = self._chars[self._position :] + data
        self._position = 0
        return True
