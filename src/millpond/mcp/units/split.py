"""The units of a file, by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator

from millpond.mcp.units.code import definitions
from millpond.mcp.units.languages import LANGUAGES
from millpond.mcp.units.markdown import sections
from millpond.mcp.units.unit import Unit, lines_of, pieces


def language_of(path: str) -> str:
    """The language of a file; ``text`` if it is none of the table."""
    return LANGUAGES.get(os.path.splitext(path)[1].lower(), "text")


def split(path: str, text: str) -> Iterator[Unit]:
    """Sections of Markdown, functions and classes of code, paragraphs of all else."""
    language = language_of(path)
    if language == "text":
        return pieces(lines_of(text), kind="text", name="", first=1)
    return sections(text) if language == "markdown" else definitions(text, language)
