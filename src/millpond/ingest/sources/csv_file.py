"""CSV and TSV sources: a header row, and a record a row, whose other columns become metadata of the types named."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date, datetime
from pathlib import Path
from typing import Any, TextIO

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.compression import SourcePosition, kind_of, open_source
from millpond.ingest.sources.lines import MAX_RECORD_BYTES, read_text_lines, too_long
from millpond.ingest.sources.rows import Columns, make_record

# A cell may hold a book. The csv module's limit (128 Ki characters) is global to the process, so it is only raised.
_FIELD_CHARS = 2 * MAX_RECORD_BYTES + 2  # a row is noticed to be too long after the line that makes it so


def _finite(cell: str) -> float:
    if math.isfinite(value := float(cell)):
        return value
    raise ValueError


_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
TYPES: Mapping[str, tuple[str, Callable[[str], Any], str]] = {
    "str": (".*", str, "any text"),
    "int": ("[+-]?[0-9]+", int, "a whole number like 2024"),
    "float": (r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", _finite, "a number like 9.99"),
    "bool": ("|".join(_BOOLS), lambda cell: _BOOLS[cell.lower()], "true, false, yes, no, 1 or 0"),
    "date": (".*", lambda cell: date.fromisoformat(cell).isoformat(), "a date like 2024-05-31"),
    "datetime": (".*", lambda cell: datetime.fromisoformat(cell).isoformat(), "a time like 2024-05-31T12:00:00+02:00"),
}
"""For each name of a type: which cells are read, how, and what is accepted, in words."""


class CsvRows:
    """Iterates over the rows of a CSV: the cells of each, or why it has none.

    A row that is not CSV costs its first line, and reading resumes with the next one: a quote that is never closed does
    not swallow the rows behind it. Until a well-formed row follows, a row with a quote inside an unquoted cell is taken
    for the rest of the broken one, and rejected too.
    """

    def __init__(self, file: TextIO, *, delimiter: str) -> None:
        self._lines = read_text_lines(file)
        self._delimiter = delimiter
        self._pending: deque[str | int] = deque()  # lines to read before those of the file
        # Possessive: to go back into a cell of megabytes would take gigabytes.
        cell = rf'(?:"(?:[^"]|"")*+"|[^"{re.escape(delimiter)}\r\n]*+)'
        self._clean = re.compile(rf"{cell}(?:{re.escape(delimiter)}{cell})*[\r\n]*")
        self.line = 1
        self.taken: list[str | int] = []  # lines of the row; of one that is too long the size, which ends the row

    @property
    def text(self) -> str:
        """The row as it is in the file, without lines that are too long."""
        return "".join(line for line in self.taken if isinstance(line, str))

    def __iter__(self) -> Iterator[tuple[list[str], str | None]]:
        """Yields the cells of a row and ``None``, or no cells and the fault of the row."""
        csv.field_size_limit(max(csv.field_size_limit(), _FIELD_CHARS))
        reader, broken = self._reader(), False
        fault: str | None
        cells: list[str]
        while True:
            self.line += len(self.taken)
            self.taken.clear()
            fault, cells = None, []
            try:
                if (row := next(reader, None)) is None:
                    return
                cells = row
                if broken and not self._clean.fullmatch(self.text):
                    fault = "a quote in an unquoted cell, behind a row that is not CSV"
            except csv.Error as error:
                fault = str(error)
                if len(self.taken) > 1:
                    fault += f", in line {self.line + len(self.taken) - 1}"
            if fault is None:
                broken = broken and not cells  # a blank line tells nothing
                yield cells, None
                continue
            broken = True
            self._pending.extendleft(reversed(self.taken[1:]))
            del self.taken[1:]
            reader = self._reader()
            yield [], f"not CSV ({fault}); reading goes on with the next line"

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._feed(), delimiter=self._delimiter, strict=True)

    def _feed(self) -> Iterator[str]:
        """The lines for the parser, which are noted in ``taken``."""
        chars = 0
        while (line := self._pending.popleft() if self._pending else next(self._lines, None)) is not None:
            first = not self.taken
            self.taken.append(line)
            if isinstance(line, int):
                raise csv.Error(too_long("line"))
            chars = len(line) + (0 if first else chars)
            if chars > MAX_RECORD_BYTES and not first:
                raise csv.Error(f"a quoted cell is longer than {MAX_RECORD_BYTES} characters, or never closed")
            yield line


class CsvReader:
    """The records of a CSV, or of a TSV. Everything but the rows is checked at construction."""

    def __init__(self, path: Path, columns: Columns, types: Mapping[str, str], position: SourcePosition) -> None:
        self._path = path
        self._columns = columns
        self._position = position
        self._delimiter = "\t" if kind_of(path) == ".tsv" else ","
        self._header = header = self._read_header()
        columns.check(repr(str(path)), header)
        for column, type_name in types.items():
            for holds, fault in (
                (column not in header, f": {str(path)!r} has the columns {', '.join(map(repr, header))}"),
                (column in (columns.id, columns.body), ": the column is the id or the text, which are str"),
                (not columns.keeps(column), ": the column is not one of metadata_columns"),
                (type_name not in TYPES, f" is unknown; choose {', '.join(TYPES)}"),
            ):
                if holds:
                    raise InvalidRequestError(f"types={column}={type_name}{fault}")
        self._types = {column: type_name for column, type_name in types.items() if type_name != "str"}
        self._dropped = [each for each in header if each not in (columns.id, columns.body) and not columns.keeps(each)]

    def records(self) -> Generator[Record | Rejected, None, None]:
        """The records, in order; a row that holds none is a :class:`Rejected`."""
        with self._opened(self._position) as file:
            rows = CsvRows(file, delimiter=self._delimiter)
            row_iterator = iter(rows)
            next(row_iterator, None)
            for cells, fault in row_iterator:
                if fault is not None:
                    yield self._rejected(rows, cells, fault)
                elif cells:
                    item: Record | Rejected
                    try:
                        item = self._record(cells)
                    except InvalidRequestError as error:
                        item = self._rejected(rows, cells, str(error))
                    yield item

    def _rejected(self, rows: CsvRows, cells: list[str], reason: str) -> Rejected:
        identity = None
        if len(cells) == len(self._header):
            identity = dict(zip(self._header, cells, strict=True)).get(self._columns.id)
        return Rejected(
            where=f"{self._path}:{rows.line}",
            reason=reason,
            content=rows.text.rstrip("\r\n").encode(errors="surrogateescape").decode(errors="backslashreplace") or None,
            record_id=identity or None,
            lines=len(rows.taken),
        )

    def _read_header(self) -> list[str]:
        with self._opened(None) as file:
            cells, fault = next(iter(CsvRows(file, delimiter=self._delimiter)), ([], None))
            if fault is not None:
                raise InvalidRequestError(f"{str(self._path)!r} does not begin with a CSV header: {fault}")
            return cells

    @contextmanager
    def _opened(self, position: SourcePosition | None) -> Iterator[TextIO]:
        # surrogateescape turns bytes that are not UTF-8 into lone surrogates, which _record rejects row by row.
        with (
            open_source(self._path, position) as file,
            io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
        ):
            yield text

    def _record(self, row: list[str]) -> Record:
        if len(row) != len(self._header):
            raise InvalidRequestError(f"the row has {len(row)} cells, the header {len(self._header)}")
        joined = "".join(row)
        if not joined.isascii():
            try:
                joined.encode()
            except UnicodeEncodeError:
                raise InvalidRequestError("not UTF-8; convert the file") from None
        cells: dict[str, Any] = dict(zip(self._header, row, strict=True))
        composed = self._columns.composed
        text = None if composed is None else composed(cells)
        for column in self._dropped:
            del cells[column]
        for column, type_name in self._types.items():
            cells[column] = _typed(column, cells[column], type_name)
        identity, body = cells.pop(self._columns.id, None), cells.pop(self._columns.body)
        return make_record(identity or None, body if composed is None else text, cells)


def _typed(column: str, cell: str, type_name: str) -> Any:
    """The value of a cell; an empty cell is ``None``."""
    text = cell.strip()
    if not text:
        return None
    pattern, read, accepted = TYPES[type_name]
    with suppress(ValueError):
        if re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL):
            return read(text)
    shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
    raise InvalidRequestError(f"column {column!r} holds {shown!r}, no {type_name}; write {accepted}")
