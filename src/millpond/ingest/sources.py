"""Sources: files, folders and standard input, read as a stream of records.

A bad line does not stop the stream: it is yielded as a :class:`Rejected`.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import stat
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest.record import Record, content_hash

logger = logging.getLogger(__name__)

_TEXT_SUFFIXES = (".txt", ".md")
# A cell may hold a book. The csv module's limit (128 Ki characters) is global to the process, so it is only raised.
_CSV_FIELD_CHARS = 1 << 27
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A line, row or file that holds no record.

    Attributes:
        where: ``path:line``, or the path of a file in a folder.
        reason: Why it holds none.
    """

    where: str
    reason: str


def read(
    source: str | os.PathLike[str], *, id_column: str = "id", text_column: str = "text"
) -> Generator[Record | Rejected, None, None]:
    """Read the records of a path.

    ========== ======================================================================================================
    ``.jsonl`` one object a line: ``id``, ``text``, ``metadata`` (other keys are ignored, and named once in the log)
    ``.csv``   a header row; the columns other than id and text become metadata
    folder     every ``.txt`` and ``.md`` below it, in order, without hidden ones; the id is the relative path
    ``-``      standard input, as JSONL
    ========== ======================================================================================================

    A missing id becomes the text's content hash; an integer id becomes a str. Blank lines are skipped.

    Args:
        source: A path, or ``"-"``.
        id_column: Key or column of the id. A CSV may lack the column only if this is the default.
        text_column: Key or column of the text.

    Yields:
        A :class:`~millpond.ingest.Record`, or a :class:`Rejected` for a line that holds none.

    Raises:
        SourceNotFoundError: No such file or folder. Like every error here, raised before the first record is read.
        InvalidRequestError: An unsupported kind of file, or a CSV without the named columns.
    """
    if id_column == text_column:
        raise InvalidRequestError(f"id_column and text_column are both {id_column!r}; name two columns")
    if os.fspath(source) == "-":
        return _jsonl(sys.stdin.buffer, "stdin", id_column, text_column)
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise SourceNotFoundError(f"there is no file or folder at {str(path)!r}")
    match path.suffix.lower():
        case ".jsonl":
            return _opened(path, id_column, text_column)
        case ".csv":
            return _csv(path, _csv_header(path, id_column, text_column), id_column, text_column)
        case ".parquet":
            raise InvalidRequestError(
                f"{str(path)!r}: reading .parquet is not available in this version; write it out as .jsonl or .csv"
            )
        case suffix:
            raise InvalidRequestError(
                f"{str(path)!r}: {suffix or 'a file without a suffix'} is not a kind of source; "
                "pass a .jsonl, a .csv, a folder of .txt and .md files, or '-' for JSONL on standard input"
            )


def _opened(path: Path, id_column: str, text_column: str) -> Generator[Record | Rejected, None, None]:
    with path.open("rb") as file:
        yield from _jsonl(file, str(path), id_column, text_column)


def _jsonl(lines: BinaryIO, name: str, id_column: str, text_column: str) -> Generator[Record | Rejected, None, None]:
    ignored: set[str] = set()
    for number, line in enumerate(lines, start=1):
        data = line.removeprefix(_BOM) if number == 1 else line
        if not data.strip():
            continue
        where = f"{name}:{number}"
        item: Record | Rejected
        try:
            row = json.loads(data.decode())
            if not isinstance(row, dict):
                raise InvalidRequestError(f"the line is a JSON {type(row).__name__}, not an object")
            unknown = row.keys() - {id_column, text_column, "metadata"} - ignored
            if unknown:
                ignored |= unknown
                logger.warning("%s: ignoring the keys %s", where, ", ".join(sorted(map(repr, unknown))))
            item = _record(row.get(id_column), row.get(text_column), row.get("metadata"))
        except InvalidRequestError as error:
            item = Rejected(where=where, reason=str(error))
        except UnicodeDecodeError as error:
            item = Rejected(where=where, reason=f"not UTF-8 (byte {error.start})")
        except (ValueError, RecursionError) as error:
            item = Rejected(where=where, reason=f"not JSON ({error})")
        yield item


def _csv_header(path: Path, id_column: str, text_column: str) -> list[str]:
    """The column names, checked before the first row is read."""
    csv.field_size_limit(max(csv.field_size_limit(), _CSV_FIELD_CHARS))
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            header = next(csv.reader(file, strict=True), [])
        except csv.Error as error:
            raise InvalidRequestError(f"{str(path)!r} does not begin with a CSV header ({error})") from None
    shown = ", ".join(map(repr, header)) or "none"
    if text_column not in header:
        raise InvalidRequestError(f"{str(path)!r} has no column {text_column!r} for the text; its columns: {shown}")
    if id_column not in header and id_column != "id":
        raise InvalidRequestError(f"{str(path)!r} has no column {id_column!r} for the id; its columns: {shown}")
    if len(set(header)) != len(header):
        raise InvalidRequestError(f"{str(path)!r} names a column twice; its columns: {shown}")
    return header


def _csv(path: Path, header: list[str], id_column: str, text_column: str) -> Generator[Record | Rejected, None, None]:
    # surrogateescape turns bytes that are not UTF-8 into lone surrogates, which _csv_record rejects row by row.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)
        next(rows, None)
        row: list[str] | None = []
        while row is not None:
            item: Record | Rejected | None = None
            try:
                row = next(rows, None)
                if row:
                    item = _csv_record(header, row, id_column, text_column)
            except InvalidRequestError as error:
                item = Rejected(where=f"{path}:{rows.line_num}", reason=str(error))
            except csv.Error as error:
                item = Rejected(where=f"{path}:{rows.line_num}", reason=f"not CSV ({error})")
            if item is not None:
                yield item


def _csv_record(header: list[str], row: list[str], id_column: str, text_column: str) -> Record:
    if len(row) != len(header):
        raise InvalidRequestError(f"the row has {len(row)} cells, the header {len(header)}")
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("not UTF-8; convert the file") from None
    cells = dict(zip(header, row, strict=True))
    identity, text = cells.pop(id_column, None), cells.pop(text_column)
    return _record(identity or None, text, cells)


def _folder(folder: Path) -> Generator[Record | Rejected, None, None]:
    files = 0
    unreadable: list[OSError] = []
    for parent, children, names in os.walk(folder, onerror=unreadable.append):
        yield from _unlisted(unreadable)
        children[:] = sorted(child for child in children if not child.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or not name.lower().endswith(_TEXT_SUFFIXES):
                continue
            files += 1
            yield _text_file(Path(parent, name), folder)
    yield from _unlisted(unreadable)
    if not files:
        logger.warning("%s holds no .txt or .md file", folder)


def _unlisted(errors: list[OSError]) -> Iterator[Rejected]:
    """Empty the list: a rejection for every folder that could not be listed."""
    while errors:
        error = errors.pop(0)
        yield Rejected(where=str(error.filename), reason=f"cannot be listed ({error.strerror})")


def _text_file(path: Path, folder: Path) -> Record | Rejected:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe would block
            return Rejected(where=str(path), reason="is no regular file")
        return Record(path.relative_to(folder).as_posix(), path.read_bytes().removeprefix(_BOM).decode())
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except InvalidRequestError as error:
        reason = str(error)
    return Rejected(where=str(path), reason=reason)


def _record(identity: Any, text: Any, metadata: Any) -> Record:
    if identity is None:
        identity = content_hash(text)
    elif isinstance(identity, int) and not isinstance(identity, bool):
        identity = str(identity)
    return Record(identity, text, {} if metadata is None else metadata)
