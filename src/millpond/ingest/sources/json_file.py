"""JSON sources: one object a line (.jsonl, .ndjson), one array of objects (.json), and lines that are dead letters."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.compression import SourcePosition, joined, open_source
from millpond.ingest.sources.json_array import ArrayReader, LeftOut
from millpond.ingest.sources.lines import MAX_RECORD_BYTES, read_lines, too_long
from millpond.ingest.sources.rows import RowReader, make_record

DEAD_LETTER_KEY = "millpond_dead_letter"
"""The key that marks a line as a dead letter; its value is the version of the format."""

_VERSION = 1


def dump_record(record: Record, *, where: str, reason: str) -> str:
    """A line for a record that could not be embedded or stored; a piece of a longer text keeps its number."""
    letter: dict[str, Any] = {"id": record.id, "text": record.text, "metadata": record.metadata}
    if record.chunk:
        letter["chunk"] = record.chunk
    line = _dump(letter, where, reason)
    # No run could read a longer line again.
    return line if len(line.encode(errors="replace")) <= MAX_RECORD_BYTES else _dump({}, where, reason)


def dump_rejected(rejected: Rejected) -> str:
    """A line for a line, row or item that held no record, with its content if it is known."""
    letter: dict[str, Any] = {} if rejected.content is None else {"content": rejected.content}
    return _dump(letter, rejected.where, rejected.reason)


def _dump(letter: dict[str, Any], where: str, reason: str) -> str:
    return json.dumps({DEAD_LETTER_KEY: _VERSION, **letter, "reason": reason, "where": where}, ensure_ascii=False)


def read_dead_letter(letter: Mapping[str, Any], where: str, rows: RowReader) -> Record | Rejected:
    """The record of a dead letter, whatever the names of the source's columns; its reason is left behind.

    A line that held no record is read again as an object of JSON; if it still is none, it is rejected with the place
    and the reason of the letter.
    """
    if (version := letter[DEAD_LETTER_KEY]) != _VERSION:
        reason = f"{DEAD_LETTER_KEY}={version!r} is not known to this version of millpond, which reads {_VERSION}"
        return Rejected(where=where, reason=reason)
    origin, reason = str(letter.get("where") or where), str(letter.get("reason") or "holds no record")
    content = letter.get("content")
    try:
        if "text" in letter:
            content = json.dumps(dict(letter), ensure_ascii=False)
            record = make_record(letter.get("id"), letter["text"], letter.get("metadata") or {})
            return replace(record, chunk=letter["chunk"]) if "chunk" in letter else record
        row = json.loads(content) if isinstance(content, str) else None
        if isinstance(row, dict) and DEAD_LETTER_KEY not in row:
            return rows.record(row)
    except InvalidRequestError as error:
        reason = str(error)
    except (ValueError, RecursionError):  # the line was no JSON
        pass
    return Rejected(where=origin, reason=reason, content=content if isinstance(content, str) else None)


BOM = b"\xef\xbb\xbf"


def read_jsonl(path: Path, rows: RowReader, position: SourcePosition) -> Generator[Record | Rejected, None, None]:
    """The records of a file with one object a line."""
    with open_source(path, position) as file:
        yield from read_json_lines(file, str(path), rows)


def read_json_lines(lines: BinaryIO, name: str, rows: RowReader, *, first: int = 1) -> Iterator[Record | Rejected]:
    """The records of a stream with one object a line, which begins at the line ``first``; blank lines are skipped."""
    for number, line in enumerate(read_lines(lines), start=first):
        if isinstance(line, int):
            yield Rejected(where=f"{name}:{number}", reason=too_long("line", line))
            continue
        data = line.removeprefix(BOM) if number == 1 else line
        if data.strip():
            yield _line(data, f"{name}:{number}", rows)


def _line(data: bytes, where: str, rows: RowReader) -> Record | Rejected:
    row: object = None
    try:
        row = json.loads(data.decode())
        if type(row) is dict and DEAD_LETTER_KEY not in row:  # nearly all
            return rows.record(row)
        return _record(row, "line", where, rows)
    except InvalidRequestError as error:
        reason = str(error)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except (ValueError, RecursionError) as error:
        reason = f"not JSON ({error})"
    content = data.decode(errors="backslashreplace").strip()
    return Rejected(where=where, reason=reason, content=content, record_id=rows.id_of(row))


def read_json(path: Path, rows: RowReader, position: SourcePosition) -> Generator[Record | Rejected, None, None]:
    """The records of a file with one array of objects, one object, or one object a line."""
    with open_source(path, position) as file:
        data = file.read(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            yield from _large_json(data, file, path, rows)
            return
    try:
        values = json.loads(data.decode("utf-8-sig").strip() or "[]")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{str(path)!r} is not UTF-8 ({error.reason}); convert the file") from None
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data" and data.lstrip()[:1] == b"{":  # objects, one a line
            yield from read_json_lines(io.BytesIO(data), str(path), rows)
            return
        raise InvalidRequestError(
            f"{str(path)!r} is not JSON ({error}); mend it, or write one object a line into a .jsonl"
        ) from None
    for index, value in enumerate(values if isinstance(values, list) else [values]):
        yield _element(value, f"{path}[{index}]", rows)


def _large_json(data: bytes, file: BinaryIO, path: Path, rows: RowReader) -> Iterator[Record | Rejected]:
    """The records of a file that is larger than a record may be, and begins with ``data``."""
    text, whole = data.removeprefix(BOM).lstrip(), joined(data, file)
    if text[:1] == b"{":
        line, line_end, _ = text.partition(b"\n")
        if line_end and not _is_json(line):
            yield Rejected(where=f"{path}[0]", reason=too_long("object"))
        else:
            yield from read_json_lines(whole, str(path), rows)
        return
    try:
        for index, value in enumerate(ArrayReader(whole)):
            yield _element(value, f"{path}[{index}]", rows)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{str(path)!r} is not UTF-8 ({error.reason}); convert the file") from None
    except ValueError as error:
        raise InvalidRequestError(
            f"{str(path)!r} is not JSON ({error}); mend it, or write one object a line into a .jsonl"
        ) from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _element(value: object, where: str, rows: RowReader) -> Record | Rejected:
    if isinstance(value, LeftOut):
        return Rejected(where=where, reason=value.reason)
    try:
        return _record(value, "element", where, rows)
    except InvalidRequestError as error:
        return rows.rejected(value, where, str(error))


def _record(row: object, noun: str, where: str, rows: RowReader) -> Record | Rejected:
    if not isinstance(row, dict):
        raise InvalidRequestError(f"the {noun} is a JSON {type(row).__name__}, not an object")
    return read_dead_letter(row, where, rows) if DEAD_LETTER_KEY in row else rows.record(row)
