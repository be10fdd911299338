"""Sources: files, folders, standard input and objects in memory, read as a stream of records.

A bad line does not stop the stream: it is yielded as a :class:`Rejected`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterable, Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.arguments import described
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.arrow import ARROW_SUFFIXES, read_arrow
from millpond.ingest.sources.columns import check_names
from millpond.ingest.sources.compression import check_source, kind_of
from millpond.ingest.sources.csv_file import CsvReader
from millpond.ingest.sources.folder import SkippedFiles, read_folder
from millpond.ingest.sources.iterables import read_items
from millpond.ingest.sources.json_file import read_json, read_json_lines, read_jsonl
from millpond.ingest.sources.rows import RowReader
from millpond.ingest.sources.tables import check_table, is_table, read_table

__all__ = ["RECORD_SUFFIXES", "Rejected", "SkippedFiles", "read"]

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *ARROW_SUFFIXES)
"""Suffixes of files that hold records; other files are read by no one but the commands that take plain texts."""

_TYPED = (".csv", ".tsv")


def read(
    source: str | os.PathLike[str] | Iterable[Any] | Any,
    *,
    id_column: str = "id",
    text_column: str = "text",
    metadata_columns: Collection[str] | None = None,
    types: Mapping[str, str] | None = None,
) -> Generator[Record | Rejected, None, SkippedFiles | None]:
    """Read the records of a path, a table or an iterable.

    ======================== ========================================================================================
    ``.jsonl .ndjson``       one object a line: ``id``, ``text``, ``metadata``; other keys become metadata
    ``.json``                an array of such objects, read as a stream
    ``.csv .tsv``            a header row; the columns other than id and text become metadata, as str or as ``types``
                             says
    ``.parquet .arrow``      the same with the types of the columns; ``.feather`` too. They need ``millpond[parquet]``
    ``.gz .zst``             after ``.jsonl``, ``.json``, ``.csv`` or ``.tsv``: the same, compressed; .zst needs
                             ``millpond[zstd]``
    folder                   every ``.txt`` and ``.md`` below it, in order, without hidden ones; the id is the path
    ``-``                    standard input, as JSONL
    a table                  a ``Dataset`` or ``IterableDataset`` of Hugging Face; a table, batch, reader or dataset of
                             pyarrow; a DataFrame of pandas or polars
    an iterable              of :class:`~millpond.ingest.Record`, dicts as in JSONL, ``Document`` of LangChain, or nodes
                             and ``Document`` of LlamaIndex
    ======================== ========================================================================================

    A missing id becomes the text's content hash; an integer id becomes a str. Blank lines are skipped. If a key is both
    in ``metadata`` and beside it, the value in ``metadata`` is stored, and the log names the key once. A line of a
    dead-letter file is the record that failed, without the reason.

    Args:
        source: A path, ``"-"``, a table or an iterable.
        id_column: Key or column of the id. A table may lack the column only if this is the default.
        text_column: Key or column of the text.
        metadata_columns: Keys or columns that are kept as metadata; ``None``: all. Of a ``metadata`` that is an object,
            its keys are meant, or all of them by ``"metadata"``.
        types: Types of a CSV's other columns: ``str``, ``int``, ``float``, ``bool``, ``date`` or ``datetime`` (stored
            as ISO 8601). An empty cell of a typed column is stored as None; a cell of another type rejects its row.

    Yields:
        A :class:`~millpond.ingest.Record`, or a :class:`Rejected` for a line that holds none.

    Returns:
        Of a folder, the files that were not read (also named in the log); of a generator, what it returns.

    Raises:
        SourceNotFoundError: No such file or folder. Like every error here, raised before the first record is read.
        InvalidRequestError: An unsupported kind of file, or a table without the named columns. A compressed file, a
            ``.json`` or a Parquet file that is damaged further on raises after the records before the damage.
        MissingExtraError: A file or table without the package that reads it.
        TypeError: ``source`` is nothing that can be read: one record, or the splits of a ``DatasetDict``.
    """
    check_names(id_column, text_column, metadata_columns)
    if isinstance(source, str | os.PathLike):
        return _read_path(source, id_column, text_column, metadata_columns, types)
    check_records(source)
    if types:
        _refuse_types(types, f"a {type(source).__name__}")
    table = read_table(source, id_column=id_column, text_column=text_column, metadata_columns=metadata_columns)
    if table is not None:
        return table
    rows = RowReader("records", id_column=id_column, text_column=text_column, metadata_columns=metadata_columns)
    return read_items(source, rows)


def _read_path(
    source: str | os.PathLike[str],
    id_column: str,
    text_column: str,
    metadata_columns: Collection[str] | None,
    types: Mapping[str, str] | None,
) -> Generator[Record | Rejected, None, SkippedFiles | None]:
    from_stdin = os.fspath(source) == "-"
    path = Path(os.path.expanduser(source))
    is_folder = not from_stdin and path.is_dir()
    kind = "" if from_stdin or is_folder else kind_of(path)
    if types and kind not in _TYPED:
        _refuse_types(types, repr(str(source)))
    rows = RowReader(
        "stdin" if from_stdin else str(path),
        id_column=id_column,
        text_column=text_column,
        metadata_columns=metadata_columns,
    )
    if from_stdin:
        return _from_stdin(rows)
    if is_folder:
        if metadata_columns is not None:
            named = ",".join(metadata_columns)
            raise InvalidRequestError(
                f"metadata_columns={named}: the texts of the folder {str(path)!r} have no columns"
            )
        return read_folder(path)
    if not path.is_file():
        raise SourceNotFoundError(f"there is no file or folder at {str(path)!r}")
    match kind:
        case ".jsonl" | ".ndjson":
            check_source(path)
            return read_jsonl(path, rows)
        case ".json":
            check_source(path)
            return read_json(path, rows)
        case ".csv" | ".tsv":
            return CsvReader(
                path,
                id_column=id_column,
                text_column=text_column,
                metadata_columns=metadata_columns,
                types=types or {},
            ).records()
        case ".parquet" | ".arrow" | ".feather":
            return read_arrow(
                path, kind, id_column=id_column, text_column=text_column, metadata_columns=metadata_columns
            )
        case _:
            raise InvalidRequestError(
                f"{str(path)!r}: {kind or 'a file without a suffix'} is not a kind of source; "
                "pass a .jsonl, .ndjson, .json, .csv or .tsv (also as .gz or .zst), a .parquet, .arrow or .feather, "
                "a folder of .txt and .md files, or '-' for JSONL on standard input"
            )


def _refuse_types(types: Mapping[str, str], source: str) -> None:
    named = ",".join(f"{column}={name}" for column, name in types.items())
    raise InvalidRequestError(f"types={named} are those of a CSV's columns, and {source} is none")


def _from_stdin(rows: RowReader) -> Generator[Record | Rejected, None, None]:
    yield from read_json_lines(sys.stdin.buffer, "stdin", rows)


def check_records(records: object) -> None:
    """Raise TypeError for anything but a path, a table or an iterable of records."""
    if isinstance(records, str | os.PathLike) or (is_table(records) and not isinstance(records, type)):
        return
    check_table(records)
    if isinstance(records, Record | Mapping) or hasattr(records, "page_content") or hasattr(records, "get_content"):
        raise TypeError(f"records is one {type(records).__name__}; pass a list of them")
    if isinstance(records, AsyncIterable):
        raise TypeError(
            f"records is {described(records)}, which is asynchronous; pass an iterable, such as a list made by "
            "[record async for record in records]"
        )
    if isinstance(records, bytes | bytearray) or not isinstance(records, Iterable):
        raise TypeError(f"records is {described(records)}; pass a path, or an iterable of Record(id, text, metadata)")
