"""Sections of a DOCX, by the styles of its headings, with the rows of its tables."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from millpond.ingest.sources.files.part import Part, SectionBuilder

_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
# A small archive may hold gigabytes.
_MOST_UNPACKED = 256 << 20
_OLE = b"\xd0\xcf\x11\xe0"


class UnreadableDocumentError(Exception):
    """A document that holds no text that can be read, with the reason."""


def docx_sections(data: bytes) -> Iterator[Part]:
    """The sections of a document; raises UnreadableDocumentError for one that is none."""
    if data.startswith(_OLE):
        raise UnreadableDocumentError("is encrypted, or a .doc of an old version; save it as .docx without a password")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _MOST_UNPACKED:
            raise UnreadableDocumentError(
                f"holds {size >> 20} MiB, and at most {_MOST_UNPACKED >> 20} are read; cut it into several"
            )
        document = import_module("docx").Document(io.BytesIO(data))
        builder = SectionBuilder()
        for block in document.iter_inner_content():
            if hasattr(block, "rows"):
                builder.block("\n".join(_rows(block)))
                continue
            text, level = block.text.strip(), _level(block.style)
            if level is None:
                builder.block(text)
            else:
                yield from builder.heading(level, " ".join(text.split()))
        yield from builder.end()
    except UnreadableDocumentError:
        raise
    except Exception as error:  # a damaged document fails in the archive, in its XML, or by what is missing in it
        raise UnreadableDocumentError(f"is no DOCX that can be read ({type(error).__name__}: {error})") from error


def _level(style: Any) -> int | None:
    """The level of a heading, by its style or one that this is based on; ``None`` for other text."""
    while style is not None:
        name = style.name or ""
        if (match := _HEADING.fullmatch(name)) is not None:
            return int(match[1])
        if name.lower() == "title":
            return 0
        style = style.base_style
    return None


def _rows(table: Any) -> Iterator[str]:
    """The rows of a table, with the text of each cell, also of tables in it; a merged cell counts once."""
    for row in table.rows:
        cells: list[Any] = []
        for cell in row.cells:
            if not cells or cell._tc is not cells[-1]._tc:
                cells.append(cell)
        texts = [" ".join(_words(cell)) for cell in cells]
        if any(texts):
            yield " | ".join(texts)


def _words(cell: Any) -> Iterator[str]:
    for block in cell.iter_inner_content():
        if hasattr(block, "rows"):
            yield from _rows(block)
        elif words := " ".join(block.text.split()):
            yield words
