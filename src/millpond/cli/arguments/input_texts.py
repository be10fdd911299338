"""Input texts of ``embed`` and ``rerank``: the sources of ingest, and files with one text per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import typer

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.compression import check_source, kind_of, open_source
from millpond.ingest.sources.lines import read_lines, too_long
from millpond.ingest.sources.pipe import check_standard_input, is_pipe, open_pipe
from millpond.ingest.sources.read import RECORD_SUFFIXES, line_reader, read
from millpond.ingest.sources.rows import Columns

_BOM = b"\xef\xbb\xbf"


def read_texts(
    source: str, *, id_column: str, text_column: str | list[str], template: str | None = None
) -> Iterator[Record | Rejected]:
    """Read texts from a path, or from standard input (``-``).

    Files of records and folders are read as by :func:`millpond.ingest.read`; any other file has one text per line,
    whose number is the id. Standard input is JSONL if it begins with ``{``.
    """
    path = Path(source)
    piped = source == "-" or is_pipe(path)
    if not piped and not has_lines(source):
        return read(source, id_column=id_column, text_column=text_column, template=template)
    if piped:
        lines, pipe = open_pipe(None if source == "-" else path)
        if lines.peek(1).removeprefix(_BOM).lstrip().startswith(b"{"):
            columns = Columns(id=id_column, text=text_column, template=template)
            return line_reader(lines, "stdin" if source == "-" else source, columns, pipe)
    elif not path.is_file():
        raise SourceNotFoundError(f"there is no file or folder at {source!r}")
    if template is not None or not isinstance(text_column, str):
        given = f"text_column={','.join(text_column)}" if template is None else f"template={template}"
        raise InvalidRequestError(f"{given}: {source!r} has a text per line and no columns; leave it out")
    if piped:
        return _lines(source, lines)
    check_source(path)
    return _file_lines(path)


def check_piped(source: str | None, hint: str) -> None:
    """Refuse standard input that is closed, or a terminal where nobody writes yet."""
    if source == "-":
        check_standard_input()
        if sys.stdin.isatty():
            raise typer.BadParameter("name a file, or pipe texts in", param_hint=hint)


def has_lines(source: str) -> bool:
    """Whether a path is that of a file with one text per line."""
    path = Path(source)
    return source != "-" and not path.is_dir() and kind_of(path) not in RECORD_SUFFIXES


def _file_lines(path: Path) -> Iterator[Record | Rejected]:
    with open_source(path) as file:
        yield from _lines(str(path), file)


def _lines(name: str, file: BinaryIO) -> Iterator[Record | Rejected]:
    for number, line in enumerate(read_lines(file), start=1):
        if isinstance(line, int):
            yield Rejected(where=f"{name}:{number}", reason=too_long("line", line))
            continue
        data = line.removeprefix(_BOM) if number == 1 else line
        if not data.strip():
            continue
        try:
            yield Record(str(number), data.rstrip(b"\r\n").decode())
        except UnicodeDecodeError as error:
            yield Rejected(where=f"{name}:{number}", reason=f"not UTF-8 (byte {error.start})")
        except InvalidRequestError as error:
            yield Rejected(where=f"{name}:{number}", reason=str(error))
