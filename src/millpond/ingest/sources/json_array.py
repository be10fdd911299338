"""ArrayReader: the elements of a JSON array of any length, in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any, BinaryIO, NamedTuple

from millpond.ingest.sources.lines import MAX_RECORD_BYTES, too_long

_READ_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_ENDS = ",] \t\n\r"  # what may stand behind an element
_STRUCTURE = re.compile(r'["\[\]{},]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')


class LeftOut(NamedTuple):
    """In place of an element that is too long, or nested too deeply: why it is not read."""

    reason: str


class ArrayReader:
    """Iterates over the elements; what is not JSON is a ValueError behind the elements before it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at = "", 0  # what is not taken yet begins at `_at`
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        self._take("[")
        if self._next_char() == "]":
            self._at += 1
        else:
            for index in count():
                yield self._element(index)
                if self._take(",]") == "]":
                    break
        if self._next_char():
            raise ValueError("data behind the array")

    def _element(self, index: int) -> Any:
        self._next_char()
        fault = ""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                fault = "a comma is missing"
                # A number may go on in what is not read yet.
                if self._text[end : end + 1] in _ENDS and (end < len(self._text) or self._ended):
                    size, self._at = end - self._at, end
                    return value if size <= MAX_RECORD_BYTES else LeftOut(too_long("element"))
            except json.JSONDecodeError as error:
                fault = error.msg
            except RecursionError as error:
                self._skip()
                return LeftOut(f"not JSON ({error})")
            if self._ended or len(self._text) - self._at > MAX_RECORD_BYTES:
                break
            # As many characters again, so that a long element is not parsed once for every block.
            self._read(max(_READ_BYTES, len(self._text) - self._at))
        if self._skip() <= MAX_RECORD_BYTES:
            raise ValueError(f"element {index}: {fault}")
        return LeftOut(too_long("element"))

    def _skip(self) -> int:
        """Go to the end of an element by its brackets and quotes alone; returns its length."""
        size, depth, quoted, at = -self._at, 0, False, self._at
        while True:
            if at >= len(self._text):
                size += len(self._text)
                at, self._at = at - len(self._text), len(self._text)  # an escaped character may be in the next block
                self._read(_READ_BYTES)
                if self._ended and not self._text:
                    raise ValueError("it ends early")
                if not quoted and '"' not in self._text:  # of a million brackets not each alone
                    closing = self._text.count("]") + self._text.count("}")
                    if closing < depth:
                        depth += self._text.count("[") + self._text.count("{") - closing
                        at = len(self._text)
                        continue
            found = (_QUOTE_OR_ESCAPE if quoted else _STRUCTURE).search(self._text, at)
            if found is None:
                at = len(self._text)
                continue
            char, at = found[0], found.end()
            if char == "\\":
                at += 1  # and the character behind it
            elif char == '"':
                quoted = not quoted
            elif char in "[{":
                depth += 1
            elif not depth:
                self._at = found.start()
                return size + self._at
            elif char in "]}":
                depth -= 1

    def _take(self, accepted: str) -> str:
        """Take the next character, which must be one of these."""
        if (char := self._next_char()) not in accepted or not char:
            raise ValueError(f"{' or '.join(accepted)} is missing" if char else "it ends early")
        self._at += 1
        return char

    def _next_char(self) -> str:
        """The next character that is no white space, which is not taken; empty at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = self._at if found is None else found.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read(_READ_BYTES)

    def _read(self, size: int) -> None:
        """Read more, and drop what is taken."""
        data = self._file.read(size)
        self._ended = not data
        self._text = self._text[self._at :] + self._bytes.decode(data, final=self._ended)
        self._at = 0
