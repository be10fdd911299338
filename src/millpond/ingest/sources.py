"""Sources: files, folders and standard input, read as a stream of records.

A bad line does not stop the stream: it is yielded as a :class:`Rejected`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.compression import check_source, kind_of
from millpond.ingest.csv_source import CsvReader
from millpond.ingest.folder_source import SkippedFiles, read_folder
from millpond.ingest.json_source import read_json, read_json_lines, read_jsonl
from millpond.ingest.record import Record, Rejected
from millpond.ingest.rows import RowReader

__all__ = ["RECORD_SUFFIXES", "Rejected", "SkippedFiles", "read"]

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
"""Suffixes of files that hold records; other files are read by no one but the commands that take plain texts."""


def read(
    source: str | os.PathLike[str],
    *,
    id_column: str = "id",
    text_column: str = "text",
    types: Mapping[str, str] | None = None,
) -> Generator[Record | Rejected, None, SkippedFiles | None]:
    """Read the records of a path.

    ===================== ===========================================================================================
    ``.jsonl .ndjson``    one object a line: ``id``, ``text``, ``metadata``; other keys become metadata
    ``.json``             an array of such objects, read as a stream
    ``.csv``              a header row; the columns other than id and text become metadata, as str or as ``types`` says
    ``.gz .zst``          after one of these (``.jsonl.gz``): the same, compressed; .zst needs ``millpond[zstd]``
    folder                every ``.txt`` and ``.md`` below it, in order, without hidden ones; the id is its path there
    ``-``                 standard input, as JSONL
    ===================== ===========================================================================================

    A missing id becomes the text's content hash; an integer id becomes a str. Blank lines are skipped. If a key is both
    in ``metadata`` and beside it, the value in ``metadata`` is stored, and the log names the key once.

    Args:
        source: A path, or ``"-"``.
        id_column: Key or column of the id. A CSV may lack the column only if this is the default.
        text_column: Key or column of the text.
        types: Types of a CSV's other columns: ``str``, ``int``, ``float``, ``bool``, ``date`` or ``datetime`` (stored
            as ISO 8601). An empty cell of a typed column is stored as None; a cell of another type rejects its row.

    Yields:
        A :class:`~millpond.ingest.Record`, or a :class:`Rejected` for a line that holds none.

    Returns:
        Of a folder, the files that are neither .txt nor .md (also named in the log).

    Raises:
        SourceNotFoundError: No such file or folder. Like every error here, raised before the first record is read.
        InvalidRequestError: An unsupported kind of file, or a CSV without the named columns. A compressed file or a
            ``.json`` that is damaged further on raises after the records before the damage.
        MissingExtraError: A .zst without the package that reads it.
    """
    if id_column == text_column:
        raise InvalidRequestError(f"id_column and text_column are both {id_column!r}; name two columns")
    from_stdin = os.fspath(source) == "-"
    path = Path(os.path.expanduser(source))
    kind = "" if from_stdin or path.is_dir() else kind_of(path)
    if types and kind != ".csv":
        named = ",".join(f"{column}={name}" for column, name in types.items())
        raise InvalidRequestError(f"types={named} are those of a CSV's columns, and {str(source)!r} is none")
    rows = RowReader("stdin" if from_stdin else str(path), id_column=id_column, text_column=text_column)
    if from_stdin:
        return _from_stdin(rows)
    if path.is_dir():
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
        case ".csv":
            return CsvReader(
                path, id_column=id_column, text_column=text_column, metadata_columns=None, types=types or {}
            ).records()
        case ".parquet":
            raise InvalidRequestError(
                f"{str(path)!r}: reading .parquet is not available in this version; write it out as .jsonl or .csv"
            )
        case _:
            raise InvalidRequestError(
                f"{str(path)!r}: {kind or 'a file without a suffix'} is not a kind of source; "
                "pass a .jsonl, .ndjson, .json or .csv (also as .gz or .zst), a folder of .txt and .md files, "
                "or '-' for JSONL on standard input"
            )


def _from_stdin(rows: RowReader) -> Generator[Record | Rejected, None, None]:
    yield from read_json_lines(sys.stdin.buffer, "stdin", rows)
