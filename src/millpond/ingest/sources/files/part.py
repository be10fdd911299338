"""Part: what becomes a record of a file, and the sections of a document with headings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_TRAIL = " > "


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section, a page, a function or a whole file.

    Attributes:
        name: What tells it from the other parts of the file; empty for a whole file, and for what no heading names.
        text: Its text.
        metadata: Where it is, beside the path.
    """

    name: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UnreadPart:
    """A part that cannot be read; the others are."""

    name: str
    reason: str


class SectionBuilder:
    """Collects headings and blocks of text in the order of the document, and makes sections of them.

    A heading with nothing below it but a deeper heading begins the deeper section: its words alone are no text.
    """

    def __init__(self) -> None:
        self._path: list[tuple[int, str]] = []
        self._headings: list[str] = []  # that the next block follows
        self._blocks: list[str] = []

    def heading(self, level: int, title: str) -> Iterator[Part]:
        """A heading; yields the section that ends before it."""
        if not title:
            return
        deeper = bool(self._path) and level > self._path[-1][0]
        if self._blocks or not deeper:
            yield from self.end()
        self._path = [*[each for each in self._path if each[0] < level], (level, title)]
        self._headings.append(title)

    def block(self, text: str) -> None:
        """A paragraph, an item of a list or a table."""
        if text.strip():
            self._blocks.append(text)

    def end(self) -> Iterator[Part]:
        """The section that is open, if it has a word."""
        if self._headings or self._blocks:
            name = _TRAIL.join(title for _, title in self._path)
            metadata = {"heading": name} if name else {}
            yield Part(name=name, text="\n\n".join([*self._headings, *self._blocks]), metadata=metadata)
        self._headings, self._blocks = [], []
