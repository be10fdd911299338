"""The records of a file: one of a text, one of each section, page or function of others."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record, Rejected
from millpond.ingest.sources.files.docx_sections import UnreadableDocumentError, docx_sections
from millpond.ingest.sources.files.html_sections import html_sections
from millpond.ingest.sources.files.kinds import MARKDOWN, is_code, kind_of_file
from millpond.ingest.sources.files.part import Part, UnreadPart
from millpond.ingest.sources.files.pdf_pages import pdf_pages
from millpond.ingest.sources.json_file import BOM
from millpond.ingest.sources.lines import MAX_RECORD_BYTES, too_long
from millpond.ingest.units.code import definitions
from millpond.ingest.units.markdown import sections
from millpond.ingest.units.unit import Unit, lines_of

MARK = "#"
"""Stands between a path and the name of a part in an id."""

_MAX_DOCUMENT_BYTES = 256 << 20
_NAME_CHARACTERS = 200  # of a part, in its id
_DOCUMENTS: dict[str, Callable[[bytes], Iterator[Part | UnreadPart]]] = {
    "html": html_sections,
    "pdf": pdf_pages,
    "docx": docx_sections,
}


def file_records(path: Path, name: str) -> Iterator[Record | Rejected]:
    """The records of a file whose path in its folder is ``name``: their ids begin with it.

    A whole text has the path as its id, a part of a file the path, ``#`` and its name: the headings of a section,
    ``page=3`` of a PDF, the name of a function. Of parts of the same name all but the first have a number.
    """
    where = shown(path)
    kind, read = kind_of_file(name) or "text", False
    try:
        data = _read(path, _MAX_DOCUMENT_BYTES if kind in _DOCUMENTS else MAX_RECORD_BYTES)
        if isinstance(data, str):
            yield Rejected(where=where, reason=data, record_id=name, parts=True)
            return
        parts = _DOCUMENTS[kind](data) if kind in _DOCUMENTS else _text_parts(kind, data)
        taken: set[str] = set()
        for part in parts:
            yield _record(part, name, where, taken)
            read = True
        if not read:  # a text of nothing, as that of any other file
            yield Record(name, "", {"path": name})
        return
    except (UnreadableDocumentError, InvalidRequestError) as error:
        reason = str(error)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte {error.start})"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except RecursionError:
        reason = "is nested too deep"
    yield Rejected(where=where, reason=reason, record_id=name, parts=True)


def shown(path: object) -> str:
    r"""A path in a message; bytes that are no UTF-8 as ``\xNN``."""
    return os.fsencode(str(path)).decode(errors="backslashreplace")


def _read(path: Path, most: int) -> bytes | str:
    """A file's bytes, or why they are not read."""
    if not stat.S_ISREG(path.stat().st_mode):  # reading from a pipe would block
        return "is not a regular file"
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) <= most:
        return data
    return too_long("file", path.stat().st_size, most)


def _record(part: Part | UnreadPart, name: str, where: str, taken: set[str]) -> Record | Rejected:
    identity = _identity(name, part.name, taken)
    if isinstance(part, UnreadPart):
        return Rejected(where=f"{where}{MARK}{part.name}", reason=part.reason, record_id=identity)
    if len(part.text) > MAX_RECORD_BYTES:
        return Rejected(where=f"{where}{MARK}{part.name}", reason=too_long("part"), record_id=identity)
    try:
        return Record(identity, part.text, {"path": name, **part.metadata})
    except InvalidRequestError as error:  # of a name that is no UTF-8
        return Rejected(where=where, reason=str(error), record_id=identity)


def _identity(name: str, part: str, taken: set[str]) -> str:
    base = part.replace("\0", "")[:_NAME_CHARACTERS]
    own, number = base, 1
    while own in taken:
        number += 1
        own = f"{base}~{number}"
    taken.add(own)
    return f"{name}{MARK}{own}" if own else name


def _text_parts(kind: str, data: bytes) -> Iterator[Part]:
    if (place := data.find(b"\0")) >= 0:
        raise UnreadableDocumentError(f"is no text (byte {place} is NUL)")
    text = data.removeprefix(BOM).decode()
    if kind == MARKDOWN or is_code(kind):
        found = sections(text, most=None) if kind == MARKDOWN else definitions(text, kind, most=None)
        units = list(_with_titles(found, lines_of(text)) if kind == MARKDOWN else found)
        yield from (_part(unit, kind) for unit in units)
        if units:
            return
    yield Part(name="", text=text, metadata=_lines(1, max(1, len(text.rstrip("\n").split("\n")))))


def _part(unit: Unit, kind: str) -> Part:
    about: dict[str, Any] = {}
    if kind == MARKDOWN:
        about = {"heading": unit.name} if unit.name else {}
    else:
        about = {"language": kind, "kind": unit.kind} | ({"name": unit.name} if unit.name else {})
    return Part(name=unit.name, text=unit.text, metadata=about | _lines(unit.first, unit.last))


def _lines(first: int, last: int) -> dict[str, int]:
    return {"first_line": first, "last_line": last}


def _with_titles(units: Iterator[Unit], lines: list[str]) -> Iterator[Unit]:
    """Sections, of which one that is only a title begins the section below it: its words alone are no text."""
    title: Unit | None = None
    for unit in units:
        if title is not None:
            if unit.name.startswith(f"{title.name} > "):
                text = "\n".join(lines[title.first - 1 : unit.last])
                unit = Unit(kind=unit.kind, name=unit.name, first=title.first, last=unit.last, text=text)
            else:
                yield title
        own = lines[unit.first - 1 : unit.last]
        title = unit if unit.name and _only_titles(own) else None
        if title is None:
            yield unit
    if title is not None:
        yield title


def _only_titles(lines: list[str]) -> bool:
    """Whether lines are headings and nothing else: of one mark, or with a row of = or - below."""
    words = [line for line in lines if line.strip()]
    rows = [not line.strip("=- \t\r") for line in words]
    underlined = [*rows[1:], False]
    return all(
        line.lstrip().startswith("#") or row or below for line, row, below in zip(words, rows, underlined, strict=True)
    )
