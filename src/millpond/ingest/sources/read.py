"""Sources: files, folders, standard input and objects in memory, read as a stream of records.

A bad line does not stop the stream: it is yielded as a :class:`Rejected`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, BinaryIO

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.arrow import ARROW_SUFFIXES, read_arrow
from millpond.ingest.sources.compression import SourcePosition, check_source, kind_of
from millpond.ingest.sources.csv_file import CsvReader
from millpond.ingest.sources.folder import SkippedFiles, check_folder, read_folder
from millpond.ingest.sources.json_file import read_json, read_json_lines, read_jsonl
from millpond.ingest.sources.pipe import Pipe, is_pipe, open_pipe
from millpond.ingest.sources.rows import Columns, RowReader, read_items
from millpond.ingest.sources.tables import check_table, is_table, read_table

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *ARROW_SUFFIXES)
"""Suffixes of files that hold records; other files are read by no one but the commands that take plain texts."""

_TYPED = (".csv", ".tsv")


class RecordReader(Iterator[Record | Rejected]):
    """The records of a source, read as they are asked for.

    Attributes:
        total: Number of records, if it is known.
        position: How much of a file is read.
        pipe: The pipe that is read; ``None`` of anything else.
        once: Whether what was read cannot be read again: of a pipe or a generator.
        skipped: The files of a folder that were not read; known at the end.
        name: What is read: the absolute path of a file or folder, or the kind of an object.
    """

    def __init__(
        self,
        items: Iterable[Record | Rejected],
        *,
        total: int | None = None,
        position: SourcePosition | None = None,
        pipe: Pipe | None = None,
        once: bool = False,
    ) -> None:
        self._items = iter(items)
        self.total = total
        self.pipe = pipe
        self.once = once or pipe is not None
        self.position = SourcePosition() if position is None else position
        self.skipped: SkippedFiles | None = None
        self.name = ""

    def __next__(self) -> Record | Rejected:
        try:
            return next(self._items)
        except StopIteration as end:
            if isinstance(end.value, SkippedFiles):
                self.skipped = end.value
            raise

    def close(self) -> None:
        """Close the files that are open."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
        if self.pipe is not None:
            self.pipe.close()


def read(
    source: str | os.PathLike[str] | Iterable[Any] | Any,
    *,
    id_column: str = "id",
    text_column: str | Sequence[str] = "text",
    template: str | None = None,
    metadata_columns: Collection[str] | None = None,
    types: Mapping[str, str] | None = None,
) -> RecordReader:
    """Read the records of a path, a table or an iterable.

    Files of JSON, CSV, Parquet and Arrow, also compressed, a folder of files, ``"-"`` for JSONL on standard input,
    tables of Hugging Face, pyarrow, pandas and polars, and iterables of :class:`~millpond.ingest.Record`, dicts and
    documents of LangChain and LlamaIndex: the page on ingestion has a table of them.

    A missing id becomes the text's content hash; an integer id becomes a str. Blank lines are skipped. If a key is both
    in ``metadata`` and beside it, the value in ``metadata`` is stored, and the log names the key once. A line of a
    dead-letter file is the record that failed, without the reason.

    Args:
        source: A path, ``"-"``, a table or an iterable.
        id_column: Key or column of the id. A table may lack the column only if this is the default.
        text_column: Key or column of the text. Of several, as ``["title", "text"]``, the values are joined by a space,
            without those that are missing or blank; all but the last one stay metadata, too.
        template: Makes the text of the columns that it names, ``"{title}: {text}"``; a missing value is empty. All but
            the last one stay metadata, too.
        metadata_columns: Keys or columns that are kept as metadata; ``None``: all. If ``metadata`` is an object, its
            keys are meant, or all of them by ``"metadata"``.
        types: Types of a CSV's other columns: ``str``, ``int``, ``float``, ``bool``, ``date`` or ``datetime`` (stored
            as ISO 8601). An empty cell of a typed column is stored as None; a cell of another type rejects its row.

    Returns:
        An iterator over a :class:`~millpond.ingest.Record`, or a :class:`Rejected` for a line that holds none. At its
        end, its attribute ``skipped`` tells which files of a folder were not read (also named in the log).

    Raises:
        SourceNotFoundError: No such file or folder. Like every error here, raised before the first record is read.
        InvalidRequestError: An unsupported kind of file, or a table without the named columns. A compressed file or a
            Parquet file that is damaged further on raises after the records before the damage, a ``.json`` file at its
            first record.
        MissingExtraError: A file or table without the package that reads it.
        TypeError: ``source`` is nothing that can be read: one record, or the splits of a ``DatasetDict``.
    """
    columns = Columns(id=id_column, text=text_column, template=template, metadata=metadata_columns)
    return reader_for(source, columns, types or {})


def reader_for(source: Any, columns: Columns | None = None, types: Mapping[str, str] | None = None) -> RecordReader:
    """The reader of whatever :func:`read` takes; a reader is returned as it is."""
    if isinstance(source, RecordReader):
        return source
    reader = _reader(source, columns or Columns(), types or {})
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        reader.name = "standard input" if path == "-" else os.path.abspath(os.path.expanduser(path))
    else:
        reader.name = f"{type(source).__module__}.{type(source).__qualname__}".removeprefix("builtins.")
    return reader


def _reader(source: Any, columns: Columns, types: Mapping[str, str]) -> RecordReader:
    if isinstance(source, str | os.PathLike):
        if os.fspath(source) != "-":
            return _path(source, columns, types)
        if types:
            _refuse_types(types, "'-'")
        return _pipe(None, columns)
    table = is_table(source) and not isinstance(source, type)
    if not table:
        _check_iterable(source)
    if types:
        _refuse_types(types, f"a {type(source).__name__}")
    items = read_table(source, columns) if table else read_items(source, RowReader("records", columns))
    once = isinstance(source, Iterator)
    return RecordReader(items, total=len(source) if isinstance(source, Sized) else None, once=once)


def _pipe(path: Path | None, columns: Columns) -> RecordReader:
    """The records of a named pipe or of standard input, one object a line."""
    lines, pipe = open_pipe(path)
    return line_reader(lines, "stdin" if path is None else str(path), columns, pipe)


def line_reader(lines: BinaryIO, name: str, columns: Columns, pipe: Pipe | None) -> RecordReader:
    """The records of an open pipe, one object a line."""
    return RecordReader(read_json_lines(lines, name, RowReader(name, columns)), pipe=pipe, once=True)


def _check_iterable(source: object) -> None:
    """Raise TypeError for anything but an iterable of records."""
    check_table(source)
    if isinstance(source, Record | Mapping) or hasattr(source, "page_content") or hasattr(source, "get_content"):
        raise TypeError(f"records is one {type(source).__name__}; pass a list of them")
    kind = f"the class {source.__name__}" if isinstance(source, type) else f"of type {type(source).__name__}"
    if isinstance(source, AsyncIterable):
        raise TypeError(
            f"records is {kind}, which is asynchronous; pass an iterable, such as a list made by "
            "[record async for record in records]"
        )
    if isinstance(source, bytes | bytearray) or not isinstance(source, Iterable):
        raise TypeError(f"records is {kind}; pass a path, or an iterable of Record(id, text, metadata)")


def _path(source: str | os.PathLike[str], columns: Columns, types: Mapping[str, str]) -> RecordReader:
    if not os.fspath(source):  # Path would make it the working directory
        raise InvalidRequestError("the path of the source is empty; pass '.' for the working directory")
    path = Path(os.path.expanduser(source))
    kind = "" if path.is_dir() else kind_of(path)
    if types and kind not in _TYPED:
        _refuse_types(types, repr(str(source)))
    if path.is_dir():
        if columns.metadata is not None:
            named = ",".join(columns.metadata)
            raise InvalidRequestError(
                f"metadata_columns={named}: the texts of the folder {str(path)!r} have no columns"
            )
        if columns.composed is not None:
            named = columns.template or ",".join(columns.texts)
            given = "text_column" if columns.template is None else "template"
            raise InvalidRequestError(f"{given}={named}: the texts of the folder {str(path)!r} have no columns")
        check_folder(path)
        return RecordReader(read_folder(path))
    if is_pipe(path):
        if kind not in ("", ".jsonl", ".ndjson"):
            raise InvalidRequestError(
                f"{str(path)!r} is a pipe, of which only JSONL can be read; write it into a file that ends with {kind}"
            )
        return _pipe(path, columns)
    if not path.is_file():
        raise SourceNotFoundError(f"there is no file or folder at {str(path)!r}")
    rows, position = RowReader(str(path), columns), SourcePosition()
    items: Iterable[Record | Rejected]
    match kind:
        case ".jsonl" | ".ndjson" | ".json":
            check_source(path)
            items = (read_json if kind == ".json" else read_jsonl)(path, rows, position)
        case ".csv" | ".tsv":
            items = CsvReader(path, columns, types, position).records()
        case ".parquet" | ".arrow" | ".feather":
            items = read_arrow(path, kind, columns)
        case _:
            raise InvalidRequestError(
                f"{str(path)!r}: {kind or 'a file without a suffix'} is not a kind of source; "
                "pass a .jsonl, .ndjson, .json, .csv or .tsv (also as .gz or .zst), a .parquet, .arrow or .feather, "
                "a folder of files, or '-' for JSONL on standard input"
            )
    return RecordReader(items, position=position)


def _refuse_types(types: Mapping[str, str], source: str) -> None:
    named = ",".join(f"{column}={name}" for column, name in types.items())
    raise InvalidRequestError(f"types={named} are for the columns of a CSV, and {source} is not one")
