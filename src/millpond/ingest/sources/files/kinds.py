"""The kinds of files that are read, by the ends of their names, and the packages that they need."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

from millpond.errors import MissingExtraError
from millpond.ingest.units.languages import GRAMMARS, LANGUAGES

MARKDOWN = "markdown"
_SUFFIXES = {
    "text": ".txt .text .rst .adoc .org .tex",
    "html": ".html .htm .xhtml",
    "pdf": ".pdf",
    "docx": ".docx",
}
_KINDS = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()} | LANGUAGES
_PACKAGES = {"html": ("selectolax",), "pdf": ("pypdf",), "docx": ("docx", "lxml")} | {
    language: ("tree_sitter", grammar.package) for language, grammar in GRAMMARS.items()
}
READ = "text, Markdown, HTML, PDF, DOCX or code"
"""The kinds, in words."""


def kind_of_file(name: str) -> str | None:
    """``text``, ``html``, ``pdf``, ``docx`` or a language of code (``markdown`` too); ``None`` for any other file."""
    return _KINDS.get(os.path.splitext(name)[1].lower())


def is_code(kind: str) -> bool:
    """Whether a kind is a language whose functions are told apart."""
    return kind in GRAMMARS


def incomplete() -> bool:
    """Whether a package of some kind is missing."""
    return any(_missing(kind) for kind in _PACKAGES)


def check_kinds(names: Iterable[str]) -> None:
    """Raise MissingExtraError for the first file that needs a package which is not installed."""
    for name in names:
        kind = kind_of_file(name)
        if kind is not None and (missing := _missing(kind)):
            noun = f"code of {kind}" if is_code(kind) else kind.upper()
            raise MissingExtraError(f"{name!r}: reading {noun} needs {missing[0]}: pip install 'millpond[files]'")


@cache
def _missing(kind: str) -> tuple[str, ...]:
    return tuple(package for package in _PACKAGES.get(kind, ()) if find_spec(package) is None)
