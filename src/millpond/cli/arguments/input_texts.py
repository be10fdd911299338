"""Input texts of ``embed`` and ``rerank``: the sources of ingest, and files with one text per line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import cast

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.compression import check_source, kind_of, open_source
from millpond.ingest.sources.lines import read_lines, too_long
from millpond.ingest.sources.read import RECORD_SUFFIXES, read

_BOM = b"\xef\xbb\xbf"


def read_texts(
    source: str, *, id_column: str, text_column: str | list[str], template: str | None = None
) -> Iterator[Record | Rejected]:
    """Read texts from a path, or from standard input (``-``).

    Files of records and folders are read as by :func:`millpond.ingest.read`; any other file has one text per line,
    whose number is the id. Standard input is JSONL if it begins with ``{``.
    """
    if source == "-":
        if sys.stdin is None:
            raise InvalidRequestError("standard input is closed; name a file, or pipe texts in")
        beginning = cast("BufferedReader", sys.stdin.buffer).peek(1)
        plain = not beginning.removeprefix(_BOM).lstrip().startswith(b"{")
    else:
        plain = has_lines(source)
    path = Path(source)
    if not plain:
        return read(source, id_column=id_column, text_column=text_column, template=template)
    if source != "-" and not path.is_file():
        raise SourceNotFoundError(f"there is no file or folder at {source!r}")
    if template is not None or not isinstance(text_column, str):
        given = f"text_column={','.join(text_column)}" if template is None else f"template={template}"
        raise InvalidRequestError(f"{given}: {source!r} has a text per line and no columns; leave it out")
    if source != "-":
        check_source(path)
    return _lines(source)


def has_lines(source: str) -> bool:
    """Whether a path is that of a file with one text per line."""
    path = Path(source)
    return source != "-" and not path.is_dir() and kind_of(path) not in RECORD_SUFFIXES


def _lines(source: str) -> Iterator[Record | Rejected]:
    with ExitStack() as stack:
        file = sys.stdin.buffer if source == "-" else stack.enter_context(open_source(Path(source)))
        for number, line in enumerate(read_lines(file), start=1):
            if isinstance(line, int):
                yield Rejected(where=f"{source}:{number}", reason=too_long("line", line))
                continue
            data = line.removeprefix(_BOM) if number == 1 else line
            if not data.strip():
                continue
            try:
                yield Record(str(number), data.rstrip(b"\r\n").decode())
            except UnicodeDecodeError as error:
                yield Rejected(where=f"{source}:{number}", reason=f"not UTF-8 (byte {error.start})")
            except InvalidRequestError as error:
                yield Rejected(where=f"{source}:{number}", reason=str(error))
