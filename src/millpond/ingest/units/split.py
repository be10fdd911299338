"""The units of a file, by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from millpond.ingest.units.code import definitions
from millpond.ingest.units.languages import LANGUAGES
from millpond.ingest.units.markdown import sections
from millpond.ingest.units.unit import MAX_CHARACTERS, Unit, lines_of, pieces


def language_of(path: str) -> str:
    """The language of a file; ``text`` if it is none of the table."""
    return LANGUAGES.get(os.path.splitext(path)[1].lower(), "text")


def split(path: str, text: str, *, most: int | None = MAX_CHARACTERS) -> Iterator[Unit]:
    """Sections of Markdown, functions and classes of code, paragraphs of all else, of at most so many characters.

    With ``None`` a section, a function and a text are whole, however long they are.
    """
    language = language_of(path)
    if language == "text":
        return pieces(lines_of(text), kind="text", name="", first=1, most=most)
    return sections(text, most=most) if language == "markdown" else definitions(text, language, most=most)
