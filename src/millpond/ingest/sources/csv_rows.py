"""CsvRows: the rows of a CSV with the lines they take; after a stray quote only its own row is lost.

A quote that is never closed makes a parser take all rows behind it as one cell. Here the lines of a row that is not CSV
are looked at again: the next quote that begins or ends a cell tells whether they are rows of their own or the rest of
the broken cell.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator

# A cell may hold a book. The csv module's limit (128 Ki characters) is global to the process, so it is only raised.
_FIELD_CHARS = 1 << 27
_ROW_CHARS = 1 << 25  # of a row over several lines; a quote that is never closed is noticed after as many
# How far the lines behind a broken row are looked at.
_AHEAD_LINES = 1000
_AHEAD_CHARS = 1 << 20


class CsvRows:
    """Iterates over the rows: the cells of each, or why it has none.

    Args:
        file: The lines, with their ends as they are.
        delimiter: What separates cells.
        width: Cells of a row; ``None`` until the header is read.

    Attributes:
        line: Number of the line where the last row begins, from 1.
        taken: Its lines.
    """

    def __init__(self, file: Iterator[str], *, delimiter: str, width: int | None = None) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _FIELD_CHARS))
        self._file = file
        self._delimiter = delimiter
        self._width = width
        self._pending: deque[str] = deque()  # lines to read before those of the file
        self._suspect_until = 0  # up to this line, a row might be a part of a broken one
        cell = rf'(?:[^"{re.escape(delimiter)}\r\n]*|"(?:[^"]|"")*")'
        self._clean = re.compile(rf"{cell}(?:{re.escape(delimiter)}{cell})*[\r\n]*")
        self._chars = 0
        self.line = 1
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[tuple[list[str], str | None]]:
        """Yields the cells of a row and ``None``, or no cells and the fault of the row."""
        reader = self._reader()
        while True:
            self.line += len(self.taken)
            self.taken.clear()
            try:
                cells = next(reader, None)
            except (csv.Error, _RowTooLongError) as error:
                last = self.line + len(self.taken) - 1
                self._suspect_until = last
                self._give_back(self._lines_of_fault())
                reader = self._reader()
                yield [], self._described(str(error), last)
                continue
            if cells is None:
                return
            if self.line <= self._suspect_until and not self._clean.fullmatch("".join(self.taken)):
                fault = "a quote in an unquoted cell, behind a row that is not CSV"
                yield [], self._described(fault, self.line)
            else:
                yield cells, None

    @property
    def text(self) -> str:
        """The last row as it is in the file."""
        return "".join(self.taken).rstrip("\r\n")

    def _described(self, error: str, last: int) -> str:
        where = f", in line {last}" if last > self.line else ""
        count = len(self.taken)
        return f"not CSV ({error}{where})" + (f"; it takes {count} lines" if count > 1 else "")

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._feed(), delimiter=self._delimiter, strict=True)

    def _feed(self) -> Iterator[str]:
        """The lines for the parser, which are noted in ``taken``."""
        taken = self.taken
        while (line := self._next_line()) is not None:
            if taken:
                self._chars = len(line) + (self._chars if len(taken) > 1 else len(taken[0]))
                if self._chars > _ROW_CHARS:
                    self._pending.appendleft(line)
                    raise _RowTooLongError(f"a quoted cell is longer than {_ROW_CHARS} characters, or never closed")
            taken.append(line)
            yield line

    def _next_line(self) -> str | None:
        return self._pending.popleft() if self._pending else next(self._file, None)

    def _give_back(self, kept: int) -> None:
        """Leave the first lines in ``taken`` and read the others again."""
        self._pending.extendleft(reversed(self.taken[kept:]))
        del self.taken[kept:]

    def _lines_of_fault(self) -> int:
        """How many lines, from that where it begins, belong to a row that is not CSV."""
        if self.taken[0].count('"') % 2 == 0:
            return 1  # whatever is wrong, all that was opened was closed in its first line
        rows = ahead = chars = 0
        while ahead < _AHEAD_LINES and chars < _AHEAD_CHARS:
            index = 1 + ahead
            if index == len(self.taken):
                line = self._next_line()
                if line is None:
                    break
                self.taken.append(line)
            line = self.taken[index]
            inside = self._is_inside(line)
            if inside is not None:
                return self._end_of_quoted(index) if inside else 1
            rows += self._is_row(line)
            ahead += 1
            chars += len(line)
        # No quote tells: text in a cell rarely has as many delimiters in most of its lines as the header has.
        return 1 if 2 * rows >= ahead else 1 + ahead

    def _is_inside(self, line: str) -> bool | None:
        """Whether a line begins in a quoted cell, by its first quote that begins or ends one; ``None``: it has none."""
        outside = (self._delimiter, "\r", "\n", "")
        for quotes in re.finditer('"+', line):
            begins = line[max(quotes.start() - 1, 0) : quotes.start()] in outside
            ends = line[quotes.end() : quotes.end() + 1] in outside
            odd = (quotes.end() - quotes.start()) % 2 == 1
            if begins and (odd != ends):  # "text, or an empty "" in quotes
                return False
            if odd and ends and not begins:
                return True
        return None

    def _end_of_quoted(self, index: int) -> int:
        """How many lines a row takes that has a quoted cell open where line ``index`` begins."""
        before = len(self.taken)
        lines = iter(self.taken[index:])
        last = index

        def rest() -> Iterator[str]:
            nonlocal last
            yield '"' + next(lines)
            while last - index < _AHEAD_LINES:
                last += 1
                if last >= before:
                    line = self._next_line()
                    if line is None:
                        return
                    self.taken.append(line)
                yield self.taken[last]

        try:
            next(csv.reader(rest(), delimiter=self._delimiter, strict=True), None)
        except csv.Error:
            return index + 1
        return last + 1

    def _is_row(self, line: str) -> bool:
        """Whether a line without a telling quote is a row by itself."""
        try:
            return len(next(csv.reader([line], delimiter=self._delimiter, strict=True), [])) == self._width
        except csv.Error:
            return False


class _RowTooLongError(Exception):
    """A row takes so many lines that a quote must be missing."""
