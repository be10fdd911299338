"""Pages of a PDF, with their numbers."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from millpond.ingest.sources.files.docx_sections import UnreadableDocumentError
from millpond.ingest.sources.files.part import Part, UnreadPart


def pdf_pages(data: bytes) -> Iterator[Part | UnreadPart]:
    """The pages of a document; raises UnreadableDocumentError for one that is none, or that needs a password."""
    pypdf = import_module("pypdf")
    log = logging.getLogger("pypdf")
    if log.level == logging.NOTSET:  # it warns of what it mends, and does not say in which file
        log.setLevel(logging.ERROR)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and not reader.decrypt("")
        count = 0 if locked else len(reader.pages)
    except Exception as error:  # a damaged document fails anywhere
        raise UnreadableDocumentError(f"is no PDF that can be read ({type(error).__name__}: {error})") from error
    if locked:
        raise UnreadableDocumentError("is encrypted; save it without a password")
    if count == 0:
        raise UnreadableDocumentError("has no page")
    for number in range(count):
        yield _page(reader, number)


def _page(reader: Any, number: int) -> Part | UnreadPart:
    name = f"page={number + 1}"  # as viewers take it in an address
    try:
        page = reader.pages[number]
        # Halves of a pair that some fonts leave alone are nothing that a database could store.
        text = page.extract_text().encode(errors="replace").decode().replace("\0", "")
        scanned = not text.strip() and _has_image(page)
    except Exception as error:
        return UnreadPart(name=name, reason=f"the page cannot be read ({type(error).__name__}: {error})")
    if scanned:
        return UnreadPart(
            name=name, reason="the page is an image without text; millpond reads no images, run OCR first"
        )
    return Part(name=name, text=text, metadata={"page": number + 1})


def _has_image(page: Any) -> bool:
    resources = page.get("/Resources")
    objects = None if resources is None else resources.get_object().get("/XObject")
    names = {} if objects is None else objects.get_object()
    return any(each.get_object().get("/Subtype") == "/Image" for each in names.values())
