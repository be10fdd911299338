"""CSV and TSV sources: a header row, and a record a row, whose other columns become metadata of the types named."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, TextIO

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.columns import check_columns
from millpond.ingest.sources.compression import kind_of, open_source
from millpond.ingest.sources.csv_rows import CsvRows
from millpond.ingest.sources.rows import make_record

_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def _int(cell: str) -> int:
    if not _INTEGER.fullmatch(cell):
        raise ValueError
    return int(cell)


def _float(cell: str) -> float:
    if not _FLOAT.fullmatch(cell) or not math.isfinite(value := float(cell)):
        raise ValueError
    return value


def _bool(cell: str) -> bool:
    try:
        return _BOOLS[cell.lower()]
    except KeyError:
        raise ValueError from None


TYPES: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "any text"),
    "int": (_int, "a whole number like 2024"),
    "float": (_float, "a number like 9.99"),
    "bool": (_bool, "true, false, yes, no, 1 or 0"),
    "date": (lambda cell: date.fromisoformat(cell).isoformat(), "a date like 2024-05-31"),
    "datetime": (lambda cell: datetime.fromisoformat(cell).isoformat(), "a time like 2024-05-31T12:00:00+02:00"),
}
"""For each name of a type: how a cell is read, and what is accepted, in words."""


class CsvReader:
    """The records of a CSV, or of a TSV. Everything but the rows is checked at construction.

    Args:
        path: The file; of a .tsv, tabs separate the cells.
        id_column: Column of the id. The file may lack it only if it is the default.
        text_column: Column of the text.
        metadata_columns: The other columns that are kept; ``None``: all.
        types: For some of the other columns, the name of a type in :data:`TYPES`; the others stay str.

    Raises:
        InvalidRequestError: The file has no header, lacks a column or names one twice, or a type is unknown.
    """

    def __init__(
        self,
        path: Path,
        *,
        id_column: str,
        text_column: str,
        metadata_columns: Collection[str] | None,
        types: Mapping[str, str],
    ) -> None:
        self._path = path
        self._delimiter = "\t" if kind_of(path) == ".tsv" else ","
        self._header = header = self._read_header()
        check_columns(
            repr(str(path)),
            header,
            id_column=id_column,
            text_column=text_column,
            metadata_columns=metadata_columns,
        )
        shown = ", ".join(map(repr, header))
        for column, type_name in types.items():
            if column not in header:
                raise InvalidRequestError(f"types={column}={type_name}: {str(path)!r} has the columns {shown}")
            if column in (id_column, text_column):
                raise InvalidRequestError(
                    f"types={column}={type_name}: the column is the id or the text, which are str"
                )
            if metadata_columns is not None and column not in metadata_columns:
                raise InvalidRequestError(f"types={column}={type_name}: the column is not one of metadata_columns")
            if type_name not in TYPES:
                raise InvalidRequestError(f"types={column}={type_name} is unknown; choose {', '.join(TYPES)}")
        self._types = {column: type_name for column, type_name in types.items() if type_name != "str"}
        self._reserved = (id_column, text_column)
        self._dropped = (
            ()
            if metadata_columns is None
            else tuple(column for column in header if column not in {*metadata_columns, *self._reserved})
        )

    def records(self) -> Generator[Record | Rejected, None, None]:
        """The records, in order; a row that holds none is a :class:`Rejected`."""
        with self._opened() as file:
            rows = CsvRows(file, delimiter=self._delimiter, width=len(self._header))
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
            identity = dict(zip(self._header, cells, strict=True)).get(self._reserved[0])
        return Rejected(
            where=f"{self._path}:{rows.line}",
            reason=reason,
            content=rows.text.encode(errors="surrogateescape").decode(errors="backslashreplace"),
            record_id=identity or None,
            lines=len(rows.taken),
        )

    def _read_header(self) -> list[str]:
        with self._opened() as file:
            cells, fault = next(iter(CsvRows(file, delimiter=self._delimiter)), ([], None))
            if fault is not None:
                raise InvalidRequestError(f"{str(self._path)!r} does not begin with a CSV header: {fault}")
            return cells

    @contextmanager
    def _opened(self) -> Iterator[TextIO]:
        # surrogateescape turns bytes that are not UTF-8 into lone surrogates, which _record rejects row by row.
        with (
            open_source(self._path) as file,
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
        for column in self._dropped:
            del cells[column]
        for column, type_name in self._types.items():
            cells[column] = _typed(column, cells[column], type_name)
        id_column, text_column = self._reserved
        identity, text = cells.pop(id_column, None), cells.pop(text_column)
        return make_record(identity or None, text, cells)


def _typed(column: str, cell: str, type_name: str) -> Any:
    """The value of a cell; an empty cell is ``None``."""
    text = cell.strip()
    if not text:
        return None
    read, accepted = TYPES[type_name]
    try:
        return read(text)
    except ValueError:
        shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
        raise InvalidRequestError(f"column {column!r} holds {shown!r}, no {type_name}; write {accepted}") from None
